"""Counts that have a least value, such as ``count.clamp(min=1)``, which add up to too much.

A count is clamped only where it is as low as a count can be, so the lowest one of a split is looked
at if nothing lower was seen before. If half of its samples count less, it was not clamped. Else it
is compared with what its samples and those of another micro-batch count together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._loss import ONLY, numbers_of, plain_number, read_numbers, terms_of
from .._parts import Chunk, Divisors
from ._compare import CheckFinding
from ._comparison import unseen
from ._subject import Subject, chosen_samples, first_that_fits

_COARSE = (torch.float16, torch.bfloat16)
_RTOL = (1e-4, 2e-2)
_N_SAMPLES = 8
DO_NOT_CLAMP = (
    "The count has a least value, as by clamp(min=1) or max(count, 1), and those of several "
    "micro-batches add up to too much. Return it as it is. If a whole batch may have a count of 0, "
    "count before step(): n = max(count(batch), 1), then step(lambda batch: total(batch) / n, "
    'batch, loss="sum").'
)


@dataclass(frozen=True, slots=True)
class Lowest:
    """The micro-batch with the lowest count of a split.

    Attributes:
        name: the term.
        count: its count.
        tolerance: how much more it may count without changing the loss by more than rounding does.
        chunk: its samples.
        other: those of the one that counts most.
    """

    name: str | None
    count: float
    tolerance: float
    chunk: Chunk
    other: Chunk


def lowest_counts(divisors: Divisors) -> list[Lowest]:
    """Return the lowest count of each term; the host waits for a device once."""
    named = [(name, chunk) for chunk, counts in divisors.items() for name in counts]
    given = [divisors[chunk][name] for name, chunk in named]
    is_coarse = any(isinstance(each, Tensor) and each.dtype in _COARSE for each in given)
    columns: dict[str | None, list[tuple[float, Chunk]]] = {}
    for (name, chunk), value in zip(named, read_numbers(given), strict=True):
        number = plain_number(value)
        if number is not None and math.isfinite(number):
            columns.setdefault(name, []).append((number, chunk))
    found = []
    for name, column in columns.items():
        # the largest of those that are as low: one sample has no halves
        count, chunk = min(column, key=lambda each: (each[0], -each[1].length))
        others = [each for each in column if each[1] != chunk]
        n_as_low = sum(each == count for each, _ in column)
        tolerance = _RTOL[is_coarse] * math.fsum(each for each, _ in column) / n_as_low
        # a clamped count of 0 adds no more than itself
        if others and not 0 < count <= tolerance:
            found.append(Lowest(name, count, tolerance, chunk, max(others)[1]))
    return found


def checked_count(subject: Subject, lowest: Lowest) -> tuple[float, CheckFinding | None]:
    """Return the lowest count that is known not to be clamped, and a count that is clamped."""
    found = first_that_fits(lambda _: _checked(subject, lowest), (1,))
    return found or (lowest.count, None)


def _checked(subject: Subject, lowest: Lowest) -> tuple[float, CheckFinding | None]:
    name = lowest.name
    chunk, other = (
        list(range(each.start, each.start + each.length)) for each in (lowest.chunk, lowest.other)
    )

    def count(indices: Sequence[int]) -> float:
        return _counts_of(subject, indices, with_terms=name is not None)[name]

    here, middle = min(count(chunk), lowest.count), len(chunk) // 2
    # samples of one group would get the numbers of those of another one
    if subject.draws_elsewhere:
        return here, None
    if middle and (half := min(count(chunk[:middle]), count(chunk[middle:]))) < here:
        return half, None
    there, both = count(other), count([*chunk, *other])
    if here + there - both <= lowest.tolerance:
        return here, None
    what = "the count" if name in (None, ONLY) else f"the count of {name!r}"
    error = (here + there) / both - 1 if both else math.inf
    return here, CheckFinding(what, both, here + there, error, (len(chunk), len(other)))


def _counts_of(
    subject: Subject, indices: Sequence[int], *, with_terms: bool = True
) -> dict[str | None, float]:
    """Return the divisors of the terms of some samples."""
    parts, found = subject.parts_of(indices), dict[str | None, float]()
    spec, whole = parts.spec, parts.inputs.whole()
    with subject.comparable(parts), unseen(parts):
        if spec.weight is not None:
            found[None] = numbers_of([spec.weight(whole)])[0]
        if with_terms and not callable(spec.loss):
            counts = terms_of(parts.call(whole), spec.loss).counts()
            found.update((name, float(count)) for name, count in counts.items())
        subject.draws_elsewhere = parts.state.rng.has_drawn(elsewhere=True)
    return found


def is_clamped(subject: Subject) -> bool:
    """Return whether counts of a few samples add up to more than these samples have together."""

    def look(n: int) -> bool:
        indices = chosen_samples(subject.tree, subject.n_samples, n)
        each = [_counts_of(subject, [i]) for i in indices]
        whole = _counts_of(subject, indices)
        return any(sum(one[name] for one in each) > 1.02 * whole[name] for name in whole)

    return bool(first_that_fits(look, (min(_N_SAMPLES, subject.n_samples),)))
