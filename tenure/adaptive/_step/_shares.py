"""How much each chunk weighs in a mean over the whole batch.

Invariant: the shares of a term are finite, not negative, and sum up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tenure._describe import describe_tensor
from tenure._errors import AdaptiveUsageError


class Shares:
    """How much each chunk weighs in a mean over the whole batch.

    Args:
        lengths: the number of samples of each chunk.
        weights: what ``weight`` returned for each chunk; None weighs by samples.

    Raises:
        AdaptiveUsageError: a weight is not a number, or less than zero, or not finite.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[object] | None) -> None:
        self._by_samples = _normalized([float(length) for length in lengths])
        self._by_name: dict[str | None, list[float]] = {}
        if weights is not None:
            by_name = [w if isinstance(w, Mapping) else {None: w} for w in weights]
            for name in by_name[0]:
                column = _numbers([_weight_of(each, name) for each in by_name], len(lengths))
                self._by_name[name] = _normalized(column) or self._by_samples
        self._weighted = weights is not None

    def of(self, name: str) -> list[float]:
        """The shares of the chunks in a term; they sum up to 1.

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


def _normalized(weights: list[float]) -> list[float]:
    """Shares of 1; none if all weights are zero, for then the mean has no value."""
    total = math.fsum(weights)
    return [weight / total for weight in weights] if total else []


def _weight_of(weights: Mapping[Any, object], name: object) -> object:
    if name in weights:
        return weights[name]
    raise AdaptiveUsageError(
        f"weight() returned {', '.join(map(repr, weights))} for one micro-batch, without {name!r}, "
        "which it had for the first. Return the same names for each."
    )


def _numbers(values: list[object], n: int) -> list[float]:
    """The weights of a term as numbers; tensors of one device are read together."""
    tensors = [v for v in values if isinstance(v, Tensor) and v.numel() == 1]
    if len(tensors) == n:
        values = list(torch.stack([t.detach().reshape(()).double() for t in tensors]).tolist())
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:  # type: ignore[operator]
            shown = describe_tensor(value) if isinstance(value, Tensor) else repr(value)
            raise AdaptiveUsageError(
                f"weight() returned {shown} for a micro-batch. Return what the mean divides by: a "
                "number that is finite and not negative, or a dict of one for each term."
            )
    return [float(value) for value in values]  # type: ignore[arg-type]
