"""What a verification found: one number that the split changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .._loss import ONLY
from ._compare import SplitDifference
from ._observed import Observed


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A number of the whole, and what the micro-batches make of it.

    Attributes:
        what: what the number is, such as ``"the gradient of 'net.0.weight'"``.
        whole: it, of the samples in one piece.
        split: it, of their parts.
        relative_error: how far all such numbers are apart at most.
        sizes: the samples of each part.
    """

    what: str
    whole: float
    split: float
    relative_error: float
    sizes: Sequence[int]

    def __str__(self) -> str:
        n_samples = sum(self.sizes)
        return (
            f"{self.what} for {n_samples} samples is {self.whole:.6g} in one piece and "
            f"{self.split:.6g} as {_sum_of(self.sizes)} ({_percent(self.relative_error)} off)"
        )


def worst(found: Iterable[SplitDifference], whole: Observed, split: Observed) -> CheckFinding:
    """Return the worst difference: of the loss, a term, or the gradient farthest off."""
    # users know their loss; a gradient is named only where the loss hides the difference
    first = max(found, key=lambda each: (each.kind in ("loss", "term"), each.relative_error))
    name = "the loss" if first.name == ONLY else f"the {first.kind} {first.name!r}"
    if first.kind == "gradient":
        a, b = whole.gradients.get(first.name), split.gradients.get(first.name)
        name = f"the gradient of {first.name!r}"
    elif first.kind == "loss":
        a, b = whole.outcome.loss, split.outcome.loss
    else:
        a, b = whole.outcome.terms[first.name], split.outcome.terms[first.name]
    numbers = farthest(a, b)
    return CheckFinding(name, *numbers, first.relative_error, split.outcome.sizes)


def farthest(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """Return the elements of two tensors of one shape that are farthest apart; of none, zeros."""
    there: Any = a if a is not None else b
    flat = [
        (torch.zeros_like(there) if each is None else each).detach().to_dense().cpu().flatten()
        for each in (a, b)
    ]
    first, second = (torch.view_as_real(x).flatten() if x.is_complex() else x for x in flat)
    # a nan that only one of them has is as far off as can be
    gap = (first.double() - second.double()).abs().nan_to_num(nan=float("inf"))
    place = int(gap.argmax())
    return float(first[place]), float(second[place])


def _sum_of(sizes: Sequence[int]) -> str:
    runs = [(size, len(list(group))) for size, group in groupby(sizes)]
    return " + ".join(str(size) if n == 1 else f"{n} x {size}" for size, n in runs)


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %" if error < 10 else f"{error:.2g} times its size"
