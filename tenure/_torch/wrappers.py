"""Tensors of a class of their own that have a shape and no data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import bound
from .quiet import TENSOR_BASE, without_subclass_functions

make_wrapper: Any = bound("torch.Tensor._make_wrapper_subclass", "lazy()")
"""Makes a tensor of a subclass that has a shape and no data."""


def recorded_by_autograd(tensor: Tensor) -> Any:
    """The node of which autograd itself has recorded a wrapper as the result; None: of none."""
    with without_subclass_functions():
        return TENSOR_BASE.grad_fn.__get__(tensor)


def require_grad(tensor: Tensor, requires_grad: bool) -> None:
    """Let autograd itself know whether a wrapper requires grad."""
    with without_subclass_functions():
        # one of inference mode can't, nor what came out of a function of autograd
        if TENSOR_BASE.is_leaf.__get__(tensor) and not TENSOR_BASE.is_inference(tensor):
            TENSOR_BASE.requires_grad_(tensor, requires_grad)
