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
        return make_wrapper(Wrapper, (2, 3), dtype=torch.float32, device="cpu", requires_grad=True)

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x + 1

    with without_subclass_functions():
        fits = TENSOR_BASE.shape.__get__(new()) == (2, 3)
    made: Any = Own.apply(new())  # type: ignore[no-untyped-call]  # torch left it unannotated
    return fits and recorded_by_autograd(new()) is None and recorded_by_autograd(made) is not None
