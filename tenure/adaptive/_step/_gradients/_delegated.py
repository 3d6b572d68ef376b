"""Backward passes that a function of the user's runs, such as ``accelerator.backward``.

Invariant: it gets scalars, and the gradient of each is what one backward pass of the step has to
leave. So what it scales, it scales once, however many chunks and passes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tenure._errors import AdaptiveUsageError
from tenure.scopes import persist

from ..._callables import short_name_of

Backward = Callable[[Tensor], object]
Pair = tuple[Tensor, Tensor | None]
"""A tensor to run backward from, and the gradient it gets; None for 1."""

# In float16 a scale of 1/3 is off by so much; what is off by more depends on the loss.
_FACTOR_RTOL = 1e-2


class DelegatedBackward:
    """Runs backward by a function of the user's.

    Args:
        function: gets a scalar, and runs it or a multiple of it backward.
    """

    def __init__(self, function: Backward) -> None:
        self._function = function
        self._name = short_name_of(function)
        self._factors: list[Tensor] = []

    def begin(self) -> None:
        """Start an attempt."""
        self._factors = []

    def run(self, pairs: Sequence[Pair]) -> None:
        """Run backward from some tensors at once.

        Raises:
            AdaptiveUsageError: the function ran nothing.
        """
        scalar = _scalar_of(pairs)
        seen: list[Tensor] = []
        scalar.register_hook(seen.append)
        # what it keeps, such as the scale of a scaler that begins now, outlives an attempt that
        # fails
        with persist():
            self._function(scalar)
        if not seen:
            raise AdaptiveUsageError(
                f"backward= of step(), {self._name!r}, ran no backward pass from the loss that it "
                "got, so that gradients would be missing. Let it call backward() on its argument, "
                "or on a multiple of that."
            )
        self._factors.append(sum(seen[1:], seen[0]))

    def check_linear(self) -> None:
        """Make sure that all scalars were scaled alike; the host waits for the device here.

        Raises:
            AdaptiveUsageError: they were not.
        """
        factors = [float(factor.detach()) for factor in self._factors]
        # nan where a scale is no number; what comes of that is the user's to see
        if factors and max(factors) - min(factors) > _FACTOR_RTOL * max(map(abs, factors)):
            raise AdaptiveUsageError(
                f"backward= of step(), {self._name!r}, multiplied the gradients of one micro-batch "
                f"by {min(factors):g} and those of another by {max(factors):g}. A step can be "
                "split only if all get the same factor. Nothing was changed. Do what depends on "
                "the loss in the function of step(), or in loss= or then=."
            )


def _scalar_of(pairs: Sequence[Pair]) -> Tensor:
    """A scalar whose gradient is what the tensors get."""
    tensors, seeds = zip(*pairs, strict=True)
    with torch.enable_grad():
        if len(pairs) == 1 and seeds[0] is None:
            # the user may write into it, and the loss is reported afterwards
            return torch.clone(tensors[0])
        scalar: Tensor = _Weighted.apply(seeds, *tensors)  # type: ignore[no-untyped-call]
        return scalar


class _Weighted(torch.autograd.Function):
    """The sum of tensors, each multiplied by a given gradient, in single precision or better.

    By multiplications that autograd records, a scale of 2 ** 16 would be infinite on its way to
    tensors in float16.
    """

    @staticmethod
    def forward(ctx: Any, seeds: Sequence[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*seeds)
        ctx.types = [tensor.dtype for tensor in tensors]
        values = [_dot(t, s) for t, s in zip(tensors, seeds, strict=True)]
        # terms may stand on several devices
        return sum((value.to(values[0].device) for value in values[1:]), values[0])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # of the decorator
        ctx: Any, gradient: Tensor
    ) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.types, strict=True)
        return None, *(_scaled(seed, gradient, dtype) for seed, dtype in pairs)


def _dot(tensor: Tensor, seed: Tensor | None) -> Tensor:
    product = tensor if seed is None else tensor * seed.conj()
    if product.is_complex():
        product = product.real
    return product.sum(dtype=_wide(product.dtype))


def _scaled(seed: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    if seed is None:
        return gradient.to(dtype)
    return (seed.to(_wide(dtype)) * gradient.to(seed.device)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
