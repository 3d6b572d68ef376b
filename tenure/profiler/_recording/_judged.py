"""Whether a place grows, by what each look saw there.

A leak adds to what is there, at about the same rate, up to the last look. A batch of another size
replaces what was there; a cache that fills adds ever less, or has stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ._looks import Look, Sums

LOOKS = 3
"""Fewer looks than these tell nothing."""
# Where tensors are replaced by larger ones, sizes may vary by chance.
_RISES_OF_REPLACED = 4
# A place has stopped growing if, at its lowest rate so far, so many more tensors would have come.
_MISSED = 1.5
# With two rises alone it has stopped if the second brought so much less, and nothing came since.
_LESS = 2
# A place fills up if the second half of the time has brought a fourth of the first half, or less.
_FILLING = 4


def growing_from(looks: Sequence[Look], sums: Sequence[Sums], until: int) -> int | None:
    """The look from which on a place grows; None if it does not.

    Args:
        looks: all looks.
        sums: what the place held at each of them.
        until: the step up to which it is known to have held no more.
    """
    for first, fewest in (
        (_suffix(sums, all_stay=True), LOOKS - 1),
        (_suffix(sums, all_stay=False), _RISES_OF_REPLACED),
    ):
        rises = [i for i in range(first + 1, len(sums)) if _figure(sums, i) > _figure(sums, i - 1)]
        if len(rises) >= fewest:
            steps = [look.step for look in looks]
            plateau = max(until, steps[-1]) - steps[rises[-1]]
            is_over = _has_stopped(steps, sums, rises, plateau) or _is_filling(
                steps, sums, rises[0] - 1
            )
            return None if is_over else rises[0] - 1
    return None


def _suffix(sums: Sequence[Sums], *, all_stay: bool) -> int:
    """The first of the last looks between which a place never shrinks."""
    first = len(sums) - 1
    while first > 0:
        before, after = sums[first - 1], sums[first]
        if after.n_tensors < before.n_tensors or after.n_bytes < before.n_bytes:
            break
        if all_stay and not after.stayed:
            break
        first -= 1
    return first


def _figure(sums: Sequence[Sums], i: int) -> tuple[int, int]:
    return sums[i].n_tensors, sums[i].n_bytes


def _has_stopped(steps: list[int], sums: Sequence[Sums], rises: list[int], n_steps: int) -> bool:
    """Whether more would have come in the steps since the last rise, at the lowest rate so far."""
    rates = []
    for before, after in pairwise([rises[0] - 1, *rises]):
        n_new = max(1, sums[after].n_tensors - sums[before].n_tensors)
        rates.append(n_new / max(1, steps[after] - steps[before]))
    if len(rates) == LOOKS - 1 and n_steps and rates[-1] * _LESS <= rates[0]:
        return True
    return min(rates) * n_steps >= _MISSED


def _is_filling(steps: list[int], sums: Sequence[Sums], first: int) -> bool:
    """Whether little came in the second half of the time beside the first."""
    middle = (steps[first] + steps[-1]) / 2
    half = max(i for i in range(first, len(sums)) if steps[i] <= middle)
    counts = [each.n_tensors for each in sums]
    figures = counts if counts[-1] > counts[first] else [each.n_bytes for each in sums]
    return (figures[-1] - figures[half]) * _FILLING <= figures[half] - figures[first]
