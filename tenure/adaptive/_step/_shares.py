"""The share of each chunk in a mean over all of a batch, and the numbers that say so.

Invariant: the shares are finite, not negative, and sum up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor


def shares_of(lengths: Sequence[int], weights: Sequence[object] | None) -> list[float]:
    """Return the share of each chunk in a mean over the whole batch.

    Args:
        lengths: the number of samples of each chunk.
        weights: what ``weight`` returned for each chunk; None weighs by samples.

    Raises:
        AdaptiveUsageError: a weight is not a number, or less than zero, or not finite.
    """
    by_samples = _normalized([float(length) for length in lengths])
    # where all weights are zero the mean has no value, and samples stand in
    return by_samples if weights is None else _normalized(numbers_of(weights)) or by_samples


def plain_number(value: object) -> int | float | None:
    """Return a number of Python or NumPy as one of Python; None for anything else."""
    # NumPy's scalars are numbers to Python as well, but its 0-dimensional arrays are none
    if hasattr(value, "__array_interface__") and value.size == 1:  # type: ignore[attr-defined]
        value = value.item()  # type: ignore[attr-defined]
    # True as a weight is a mistake, such as a comparison that was to be summed up
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def copied(number: Any) -> Any:
    """Copy numbers: what returned them may compute the next ones in the same memory."""
    if isinstance(number, Tensor):
        return number.detach().clone()
    return number.copy() if hasattr(number, "__array_interface__") else number


def _normalized(weights: list[float]) -> list[float]:
    """Shares of 1; none if all weights are zero, for then the mean has no value."""
    # exact, so that the shares sum up to 1 as well as floats can
    total = math.fsum(weights)
    return [weight / total for weight in weights] if total else []


def numbers_of(weights: Sequence[object]) -> list[float]:
    """Return what ``weight`` returned as numbers.

    Raises:
        AdaptiveUsageError: one is not a number, or less than zero, or not finite.
    """
    numbers = []
    for weight in read_numbers(weights):
        number = plain_number(weight)
        if number is None or not 0 <= number < math.inf:
            raise AdaptiveUsageError(
                f"weight() returned {_shown(weight)} for a micro-batch. Return what the mean "
                "divides by: a number that is finite and not negative. Where each term divides by "
                "another, let the function return a dict of pairs (sum, count)."
            )
        numbers.append(float(number))
    return numbers


def read_numbers(values: Sequence[object]) -> list[object]:
    """Return the same with numbers for one-element tensors, read together by device."""
    read = list(values)
    # the host waits for a device once, not for each chunk: see
    # test_weights_on_two_devices_are_read_from_each
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and value.numel() == 1:
            alike.setdefault((value.device, value.dtype), []).append(i)
    for (_, dtype), places in alike.items():
        tensors = [values[i].detach().reshape(()) for i in places]  # type: ignore[attr-defined]
        for i, number in zip(places, torch.stack(tensors).tolist(), strict=True):
            read[i] = int(number) if dtype is torch.bool else number
    return read


def _shown(value: object) -> str:
    return describe_tensor(value) if isinstance(value, Tensor) else repr(value)
