"""From what a kernel allocates on small problems to what it would on a large one.

Along each axis (a batch, a height) every single block is taken to grow as a straight line, with all
products of axes, as the sizes of tensors, of padded copies and of buffers do: exact for a sum of
such products, of which all corners of the smallest box are measured. Where a block grows faster
than its axis, as the scores of attention do with the length, it grows with a power of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import prod

from ._events import Events, peak_of

Corner = frozenset[int]
"""The axes, by their indices, along which a problem is one step larger."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One size of a problem.

    Attributes:
        target: the size that is asked for.
        base: another one, the smaller as a rule.
        step: how much larger the axis is at the corners that it belongs to; 0 if it stays.
    """

    target: int
    base: int
    step: int


def corners(axes: list[Axis]) -> list[Corner]:
    """Every choice of the axes that don't stay as they are, none of them first."""
    moving = [i for i, axis in enumerate(axes) if axis.step]
    return [frozenset(each) for n in range(len(moving) + 1) for each in combinations(moving, n)]


def grown(axes: list[Axis], runs: Mapping[Corner, Events], most_power: int) -> Events:
    """The events at the targets of all axes.

    Args:
        axes: the sizes of the problem.
        runs: what happened at each of the corners.
        most_power: 1 where no block grows with a power of an axis.

    Returns:
        The same events with larger blocks; their peak alone if the runs differ by more than sizes.
    """
    if len({tuple(n_bytes > 0 for n_bytes in events) for events in runs.values()}) > 1:
        # a loop over the samples allocates in each turn
        runs = {corner: (peak_of(events),) for corner, events in runs.items()}
    sizes = [
        _grown(axes, {corner: abs(events[i]) for corner, events in runs.items()}, most_power)
        for i in range(len(runs[frozenset()]))
    ]
    signs = runs[frozenset()]
    return tuple(-n if sign < 0 else n for n, sign in zip(sizes, signs, strict=True))


def _grown(axes: list[Axis], at: dict[Corner, int], most_power: int) -> int:
    base = at[frozenset()]
    far = [
        _distance(axis, base, at.get(frozenset({i}), base), most_power)
        for i, axis in enumerate(axes)
    ]
    total = Fraction(0)
    for corner in at:
        inner = (frozenset(s) for n in range(len(corner) + 1) for s in combinations(corner, n))
        change = sum((-1) ** (len(corner) - len(each)) * at[each] for each in inner)
        total += change * prod((far[i] for i in corner), start=Fraction(1))
    n_bytes = -(-total.numerator // total.denominator)
    # a base may be above its target
    return max(n_bytes, *at.values()) if all(each >= 0 for each in far) else max(n_bytes, 0)


def _distance(axis: Axis, at_base: int, at_step: int, most_power: int) -> Fraction:
    """How many steps it is from the base of an axis to its target, as one block sees it."""
    if not axis.step:
        return Fraction(0)
    low, high = axis.base, axis.base + axis.step
    power = 1
    while (
        power < most_power and at_base and Fraction(high, low) ** power < Fraction(at_step, at_base)
    ):
        power += 1
    return Fraction(axis.target**power - low**power, high**power - low**power)
