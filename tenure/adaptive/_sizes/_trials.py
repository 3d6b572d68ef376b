"""The sizes that a call tries out after it has failed, on a part of its work that is taken back.

Invariant: a size above one that worked is tried only while fewer than `_MOST_OOMS` have failed,
and no more than `_MOST` are tried in a call. Sizes that worked show a line, and three of them
whether memory grows faster than that; nothing is taken to be fixed or to grow before it is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._limits import SizeLimits
from ._policy import with_margin
from ._record import Measured

_MOST = 8
"""So many parts of the work are run to be measured, and taken back, in a call at the most."""
_MOST_OOMS = 3
_LEAP = 8
"""No size is so many times the one that worked, whatever small ones have shown."""
_FIRST_SHARE = 8
"""Of a size that failed the first trial has one part in so many, where nothing is known."""
_WORTH_IT = 50
"""A growth below one part in so many is not worth a trial."""
_FEW = 4
"""From so many on a quarter of a size tells what of its memory is fixed."""
_LEAST_CURVE = 0.05
"""Slopes that differ by a smaller share are those of one line, of which measurements vary."""


class Trials:
    """What trials have shown, and which size is the next.

    Args:
        limits: the sizes that are allowed.

    Attributes:
        ok: the largest size that worked; 0 where none has.
    """

    __slots__ = ("_bad", "_limits", "_n_left", "_n_ooms", "_points", "_was_to_fit", "ok")

    def __init__(self, limits: SizeLimits) -> None:
        self._limits = limits
        self._points: list[Measured] = []
        self._bad: int | None = None
        self._was_to_fit = False
        self._n_ooms = 0
        self._n_left = _MOST
        self.ok = 0

    def failed(self, size: int, free_bytes: int, wanted: int, *, is_blind: bool) -> int | None:
        """The size after one that ran out of memory; None where no smaller one is allowed.

        Args:
            size: what failed.
            free_bytes: what is free with the attempt let go.
            wanted: the size to begin with.
            is_blind: whether that is a guess.
        """
        self._n_ooms += 1
        self._bad = size
        if self.ok:
            self._was_to_fit = True
            return self._next(free_bytes) or self.ok
        # a trial need not be large, but it has to fit: its size is not what the call comes to
        if is_blind:
            wanted = min(wanted, size // _FIRST_SHARE)
        return self._limits.below(size, wanted)

    def tried(self, size: int, needed_bytes: int | None, free_bytes: int) -> int | None:
        """The size to try out after one that worked; None where `ok` is the one to use."""
        self._n_left -= 1
        self.ok = max(self.ok, size)
        if not needed_bytes:
            return None
        self._points = sorted([*self._points, Measured(size, needed_bytes)])
        return self._next(free_bytes)

    def _next(self, free_bytes: int) -> int | None:
        if self._bad is None or not self._n_left:
            return None
        ok, align = self.ok, self._limits.align
        if self._wants_the_fixed_part(free_bytes):
            quarter = max(self._limits.floor, ok // 4 // align * align)
            if quarter < ok // 2:
                return quarter
        is_careful = self._n_ooms >= _MOST_OOMS
        points = apart(self._points)
        fits = with_margin(fitting(points, free_bytes, is_careful=is_careful))
        if len(points) == 1 and not is_careful:
            # one size that says that no more fits may be all fixed
            fits = max(fits, ok + max(align, ok // 2))
        # what was to fit and failed may have failed by far, and so may its neighbours
        doubtful = (self._bad - ok) // 4 if self._was_to_fit else 0
        if fits >= self._bad - doubtful:
            fits = (ok + self._bad) // 2
        fits = min(fits, _LEAP * ok) // align * align
        return fits if fits - ok > ok // _WORTH_IT else None

    def _wants_the_fixed_part(self, free_bytes: int) -> bool:
        """Whether all that is known is one size that says that not much more fits."""
        if len(self._points) != 1 or self.ok < _FEW:
            return False
        return free_bytes < 1.5 * self._points[0].n_bytes


def apart(points: list[Measured]) -> list[Measured]:
    """Return the last of some sizes, and up to two before it, far enough apart to show a slope.

    Measurements vary: two sizes that lie close tell little of what lies far.
    """
    found = points[-1:]
    for each in reversed(points[:-1]):
        if 4 * each.size <= 3 * found[0].size and len(found) < 3:
            found = [each, *found]
    return found


def fitting(points: Sequence[Measured], free_bytes: int, *, is_careful: bool = False) -> int:
    """The largest size that fits into so much, by what sizes needed; no less than the last one.

    Args:
        points: the measured sizes, the smallest first.
        free_bytes: what there is.
        is_careful: whether it has to fit also where memory grows with the square of the size.
    """
    size, n_bytes = points[-1]
    room = free_bytes - n_bytes
    if room <= 0:
        return size
    less, less_bytes = points[-2] if len(points) > 1 else Measured(0, 0)
    if n_bytes <= less_bytes:
        return 2 * size
    line = size + room * (size - less) / (n_bytes - less_bytes)
    square = math.sqrt(size**2 + room * (size**2 - less**2) / (n_bytes - less_bytes))
    if is_careful:
        return int(square + 1e-9)
    if len(points) < 3:
        # one more of a few is far from both
        return max(int(math.sqrt(line * square) + 1e-9), min(size + 1, int(line + 1e-9)))
    return size + int(further(points[-3:], room) + 1e-9)


def further(points: Sequence[Measured], room: float) -> float:
    """Return how much larger the last size may be, by the parabola through three sizes.

    Args:
        points: the sizes; the first may be the largest.
        room: the bytes that are left beside the last one.
    """
    (first, first_bytes), (less, less_bytes), (size, n_bytes) = points
    slope = (n_bytes - less_bytes) / (size - less)
    curve = (slope - (less_bytes - first_bytes) / (less - first)) / (size - first)
    if curve * abs(size - first) <= _LEAST_CURVE * slope:
        return room / slope
    slope_there = slope + curve * (size - less)
    return (math.sqrt(slope_there**2 + 4 * curve * room) - slope_there) / (2 * curve)
