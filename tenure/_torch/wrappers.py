"""Tensors of a class of their own that have a shape and no data."""

from __future__ import annotations

from typing import Any

import torch
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


def works() -> bool:
    """Whether a wrapper has the shape that was asked for, and a function of autograd is told."""

    class Wrapper(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return new()

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(func)

    def new() -> Any:
        return make_wrapper(Wrapper, (2, 3), dtype=torch.float32, device="cpu", requires_grad=False)

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x + 1

    with without_subclass_functions():
        fits = TENSOR_BASE.shape.__get__(new()) == (2, 3)
    source = new()
    require_grad(source, True)
    made: Any = Own.apply(source)  # type: ignore[no-untyped-call]  # torch left it unannotated
    return fits and recorded_by_autograd(new()) is None and recorded_by_autograd(made) is not None
