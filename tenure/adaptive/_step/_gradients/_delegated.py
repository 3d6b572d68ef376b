"""Backward passes that a function of the user's runs, such as ``accelerator.backward``.

Invariant: it gets scalars, and the gradient of each is what one backward pass of the step has to
leave. So what it scales, it scales once, however many chunks and passes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
    """Return a scalar whose gradient is what the tensors get."""
    tensors, seeds = zip(*pairs, strict=True)
    with torch.enable_grad():
        if len(pairs) == 1 and seeds[0] is None:
            # the user may write into it, and the loss is reported afterwards
            return torch.clone(tensors[0])
        # terms may stand on several devices
        values = [_weighted(tensor, seed).to(tensors[0].device) for tensor, seed in pairs]
        return sum(values[1:], values[0])


def _weighted(tensor: Tensor, seed: Tensor | None) -> Tensor:
    # a scale of 2 ** 16 would be infinite on its way to tensors in float16
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    wide = tensor.float() if is_half else tensor
    product = wide if seed is None else wide * seed.to(wide.dtype).conj()
    return (product.real if product.is_complex() else product).sum()
