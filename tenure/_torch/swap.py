"""Handles without data: those that gave up their tensor, and those of a class of their own.

A handle is the Python object; its TensorImpl holds the data. ``swap`` exchanges the impls of two
handles, ``make_empty`` makes an impl without storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import bound
from .quiet import TENSOR_BASE, without_subclass_functions

_DISPOSAL = "freeing the memory of disposed tensors, and predictions of memory"
_swap = bound("torch._C._swap_tensor_impl", _DISPOSAL)
make_wrapper: Any = bound("torch.Tensor._make_wrapper_subclass", f"{_DISPOSAL}, and lazy()")
"""Makes a tensor of a subclass that has a shape and no data."""
_META = torch.device("meta")


def swap(first: Tensor, second: Tensor) -> None:
    """Exchange the TensorImpls of two handles.

    Raises:
        RuntimeError: something in C++ holds a weak reference to one of them.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/python_variable.cpp
    """
    _swap(first, second)


def make_empty(cls: type[Tensor], dtype: torch.dtype) -> Tensor:
    """Make a ``cls`` of shape (0,) on the meta device, where only its dtype is to be read."""
    empty: Tensor = make_wrapper(
        cls,
        (0,),
        dtype=dtype,
        device=_META,
        dispatch_sizes_strides_policy="sizes",
        dispatch_device=True,
        dispatch_layout=True,
    )
    return empty


def recorded_by_autograd(tensor: Tensor) -> Any:
    """Return the node whose result autograd recorded as a wrapper; None if there is none."""
    with without_subclass_functions():
        return TENSOR_BASE.grad_fn.__get__(tensor)


def require_grad(tensor: Tensor, requires_grad: bool) -> None:
    """Let autograd itself know whether a wrapper requires grad."""
    with without_subclass_functions():
        # one of inference mode can't, nor what came out of a function of autograd
        if TENSOR_BASE.is_leaf.__get__(tensor) and not TENSOR_BASE.is_inference(tensor):
            TENSOR_BASE.requires_grad_(tensor, requires_grad)
