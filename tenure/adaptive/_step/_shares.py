"""The share of each chunk in a mean over all of a batch.

Invariant: the shares of a term are finite, not negative, and sum up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor


class Shares:
    """The share of each chunk in a mean over the whole batch.

    Args:
        lengths: the number of samples of each chunk.
        weights: what ``weight`` returned for each chunk; None weighs by samples.

    Raises:
        AdaptiveUsageError: a weight is not a number, or less than zero, or not finite.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[object] | None) -> None:
        # what a mean over samples needs, and what stands in where all weights are zero
        self._by_samples = _normalized([float(length) for length in lengths])
        self._by_name: dict[str | None, list[float]] = {}
        self._weighted = weights is not None
        if weights is not None:
            # the first chunk says which terms have weights; the others have to agree
            by_name = [_named(weight, weights[0]) for weight in weights]
            for name in by_name[0]:
                column = _numbers([_weight_of(each, name) for each in by_name])
                self._by_name[name] = _normalized(column) or self._by_samples

    def of(self, name: str) -> list[float]:
        """Return the shares of the chunks in a term; they sum up to 1.

        Raises:
            AdaptiveUsageError: ``weight`` gave no number for this term.
        """
        if not self._weighted:
            return self._by_samples
        shares = self._by_name.get(name, self._by_name.get(None))
        if shares is None:
            raise AdaptiveUsageError(
                f"The function of step() returned a term {name!r}, and weight() has "
                f"{', '.join(map(repr, self._by_name))}. Give a weight for each term by its name."
            )
        return shares


def numbers_by_term(weight: object) -> dict[str | None, float]:
    """Return the numbers of ``weight`` by term; one number for all has the name None.

    Raises:
        AdaptiveUsageError: it is not a number, or less than zero, or not finite.
    """
    named = _named(weight, weight)
    return {name: _numbers([each])[0] for name, each in named.items()}


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
    if isinstance(number, Mapping):
        return {name: copied(each) for name, each in number.items()}
    if isinstance(number, Tensor):
        return number.detach().clone()
    return number.copy() if hasattr(number, "__array_interface__") else number


def _normalized(weights: list[float]) -> list[float]:
    """Shares of 1; none if all weights are zero, for then the mean has no value."""
    # exact, so that the shares sum up to 1 as well as floats can
    total = math.fsum(weights)
    return [weight / total for weight in weights] if total else []


def _named(weight: object, first: object) -> dict[str | None, object]:
    """Return a weight by the names of terms, which are str; one for all terms has the name None."""
    if isinstance(weight, Mapping) != isinstance(first, Mapping):
        raise AdaptiveUsageError(
            f"weight() returned {_shown(first)} for one micro-batch and {_shown(weight)} for "
            "another. Return a number for each, or a dict with the same names for each."
        )
    if not isinstance(weight, Mapping):
        return {None: weight}
    named: dict[str | None, object] = {str(name): each for name, each in weight.items()}
    if len(named) < len(weight):
        raise AdaptiveUsageError(
            f"weight() returned weights of the same name: {', '.join(map(repr, weight))}. Call "
            "each by the name of its term."
        )
    return named


def _weight_of(weights: Mapping[str | None, object], name: str | None) -> object:
    if name in weights:
        return weights[name]
    raise AdaptiveUsageError(
        f"weight() returned {', '.join(map(repr, weights))} for one micro-batch, without {name!r}, "
        "which it had for the first. Return the same names for each."
    )


def _numbers(values: list[object]) -> list[float]:
    """Return the weights of a term for each chunk."""
    numbers = []
    for value in read_numbers(values):
        number = plain_number(value)
        if number is None or not 0 <= number < math.inf:
            raise AdaptiveUsageError(
                f"weight() returned {_shown(value)} for a micro-batch. Return what the mean "
                "divides by: a number that is finite and not negative, or a dict of one for each "
                "term."
            )
        numbers.append(float(number))
    return numbers


def read_numbers(values: list[object]) -> list[object]:
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
