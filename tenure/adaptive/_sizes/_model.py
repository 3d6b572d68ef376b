"""Choose the next size to run from the sizes that ran: ``SizeModel``, for all searches of one call.

Invariant: as long as larger sizes need no less memory, a search ends after `MOST_OOMS` failures at
the most, at a size that worked. It has 95 % of the largest if nothing is measured, and if memory is
convex in the size or goes up in the segments of an allocator. If memory goes up in larger steps,
such as a buffer that doubles, measuring may end the search at half of the largest. With a margin it
goes on after that many failures, with what fits if memory grows with the square of the size.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

from ._policy import with_margin
from ._predicted import Predict, largest_predicted
from ._record import Measured

MOST_OOMS = 3
_LEAP = 8
"""A size grows by so much at once, until three sizes have shown what grows.

Memory is convex in the size: the largest layer takes over from the weights, or memory grows with
the square of the size. What small sizes have shown is too little then.
"""
_SEGMENT_BYTES = 20 << 20
"""What allocators take from a device at once for tensors of a few MiB: memory goes up in steps.

Source: ``kLargeBuffer`` of c10/core/AllocatorConfig.h.
"""
_DOUBT = 4
"""A prediction that was too low is taken to be so by that much more."""
_LEAST_CURVE = 0.05
"""Slopes that differ by a smaller share are those of one line, of which measurements vary."""


class SizeModel:
    """What is known of sizes from ``low`` to ``high``, and which to run next.

    Args:
        low: the smallest size that is allowed, a multiple of ``align``.
        high: the largest, likewise.
        align: sizes are multiples of it.
        predict: gives the size to begin with if it is known how much memory there is.
        has_margin: whether the size found has to fit again, beside more than was there.

    Attributes:
        ok: the largest size that worked; 0 if none has yet.
        bad: the smallest size that did not fit; None if none is known.
        n_ooms: how many sizes ran out of memory.
        limit_bytes: the memory that a size may need; None: nobody can tell.
    """

    __slots__ = (
        "_align", "_has_margin", "_high", "_low", "_n_surprises", "_points", "_predict",
        "_predicted", "bad", "limit_bytes", "n_ooms", "ok",
    )  # fmt: skip

    def __init__(
        self,
        low: int,
        high: int,
        align: int = 1,
        predict: Predict | None = None,
        *,
        has_margin: bool = False,
    ) -> None:
        self._low, self._high, self._align = low, high, align
        self._has_margin = has_margin
        self._predict = predict
        self._predicted: dict[int, int] = {}
        # of sizes that ran to their end, the smallest first; the last ones may exceed the limit
        self._points: list[Measured] = []
        # failures above a size that worked, so that something spoke for them
        self._n_surprises = 0
        self.ok = 0
        self.bad: int | None = None
        self.n_ooms = 0
        self.limit_bytes: int | None = None

    @property
    def is_measured(self) -> bool:
        """Whether anything is known of what sizes need."""
        return self.limit_bytes is not None and bool(self._points)

    # --- what happened

    def ran(self, size: int, needed_bytes: int | None) -> None:
        """Note that work of this size returned, and needed so much; None: that can't be told."""
        # a size that needs nothing works elsewhere than on the device that is measured
        if needed_bytes:
            self._points = [each for each in self._points if each.size != size]
            insort(self._points, Measured(size, needed_bytes))
        if needed_bytes and self.limit_bytes is not None and needed_bytes > self.limit_bytes:
            self.bad = min(size, self.bad or size)
        else:
            self.ok = max(self.ok, size)

    def ran_out(self, size: int) -> None:
        """Note that work of this size ran out of memory."""
        self.n_ooms += 1
        self._n_surprises += self.ok > 0
        self.bad = min(size, self.bad or size)

    # --- what is next

    def next_size(self) -> int | None:
        """Return the size to run now; None: ``ok`` is the one, or if that is 0 there is none."""
        top = self._top()
        if not self.ok:
            return self._first() if top >= self._low else None
        if self.ok >= top or (self.bad is not None and _is_near(self.ok, top)):
            return None
        if self._wants_the_fixed_part():
            return max(self._low, self.ok // 4 // self._align * self._align)
        wanted = self._wanted(top)
        if wanted is None:
            return None
        # a square may say that hardly more fits: by steps of one the search would never end
        wanted = min(max(wanted, self.ok + self.ok // 40), top)
        return max(wanted // self._align * self._align, self.ok + self._align)

    def _top(self) -> int:
        """The largest size that may fit."""
        return self._high if self.bad is None else (self.bad - 1) // self._align * self._align

    def _first(self) -> int:
        """The size to begin with, or to go on with as long as none has worked."""
        if self._predict is None or self.limit_bytes is None or self.n_ooms + 1 >= MOST_OOMS:
            return self._low
        factor = 1.0
        if self.bad is not None:
            factor = _DOUBT * self.limit_bytes / max(1, self._bytes_at(self.bad))
        most = self._largest_predicted(self._low, max(1.0, factor))
        return max(self._low, most if most >= self._top() else with_margin(most))

    def _wanted(self, top: int) -> int | None:
        """Return a size above the one that works, as far as what is known allows it."""
        ok, limit_bytes, n_left = self.ok, self.limit_bytes, MOST_OOMS - self.n_ooms
        below = [each for each in self._points if each.size <= ok]
        if limit_bytes is None or not below:
            if n_left <= 0:
                return None
            return 2 * ok if self.bad is None else self._step_up(top, n_left)
        is_over = self._n_surprises or self._predict is not None
        if n_left <= 0 and is_over and not self._has_margin:
            return None
        is_careful = n_left <= 1 and self._predict is None
        is_careful &= self._has_margin or self._n_surprises < 2
        most, likely = self._fitting(below, limit_bytes, top, is_careful)
        # measuring is believed if it says that no more fits, unless memory may go up in steps
        if most < top and _is_near(ok, most):
            goes_on = not self._has_margin and limit_bytes < 20 * _SEGMENT_BYTES and n_left > 0
            return self._floors(top)[0] if goes_on else None
        wanted = top if likely >= top else with_margin(likely)
        if wanted >= top and self._has_margin:
            # what failed was to fit, and may have failed by far
            wanted = (ok + top) // 2
        above = self._above()
        if above is not None and above.size == self.bad:
            # it ran beyond the limit: anything below it runs, too
            return wanted if wanted < top else (ok + top) // 2
        if len(below) < 3 or below[-1].n_bytes < 2 * below[-2].n_bytes:
            wanted = min(wanted, _LEAP * ok)
        if not is_careful and (self._n_surprises or n_left <= 1):
            if n_left > 1 and wanted < top:
                # far from what worked it is a guess, whose failure is not worth what it saves
                return min(wanted, max(2 * ok, wanted // 2))
            return min(wanted, self._step_up(top, n_left))
        return wanted

    # --- what is measured and predicted

    def _wants_the_fixed_part(self) -> bool:
        """Tell whether all that is known is one size, which says that not much more fits."""
        if len(self._points) != 1 or self.bad is None or self._predict is not None:
            return False
        n_bytes = self._points[0].n_bytes
        return self.ok >= 4 * self._low and (self.limit_bytes or 0) < 1.5 * n_bytes

    def _fitting(
        self, below: Sequence[Measured], limit_bytes: int, top: int, is_careful: bool
    ) -> tuple[int, int]:
        """Return a size above which none fits, by what was measured, and the one that may just."""
        if self._predict is not None:
            factor = max(each.n_bytes / max(1, self._bytes_at(each.size)) for each in below)
            most = self._largest_predicted(self.ok, factor)
            # it may be 1 % less than what fits, and `ok` therefore less than 95 % of that
            floor = self._floors(top)[0]
            if most < floor and self._bytes_at(floor) * factor <= limit_bytes:
                most = floor
            return most, most
        points = apart(below)
        size, n_bytes = points[-1]
        room = max(0, limit_bytes - n_bytes)
        less, less_bytes = points[-2] if len(points) > 1 else Measured(0, 0)
        if n_bytes <= less_bytes:
            return top, min(top, 2 * size) if is_careful else top
        each = (n_bytes - less_bytes) / (size - less)
        line = size + int(room / each + 1e-9)
        above = self._above()
        if above is not None:
            points = [above, *points[-2:]]
        if is_careful:
            # it fits also if memory grows with the square of the size
            likely = int(math.sqrt(size**2 + room * (size + less) / each) + 1e-9)
        elif len(points) > 2:
            likely = size + int(further(points[-3:], room) + 1e-9)
        else:
            likely = line
        return line if less else top, min(likely, line)

    def _above(self) -> Measured | None:
        """Return the smallest size that ran and needed more than it should."""
        return next((each for each in self._points if each.size > self.ok), None)

    def _bytes_at(self, size: int) -> int:
        assert self._predict is not None
        if size not in self._predicted:
            self._predicted[size] = self._predict(size)
        return self._predicted[size]

    def _largest_predicted(self, low: int, factor: float) -> int:
        """Return the largest size whose prediction fits, at least ``low``."""
        assert self.limit_bytes is not None
        limit_bytes = self.limit_bytes / factor
        return largest_predicted(self._bytes_at, low, self._top(), limit_bytes, self._align)

    # --- by trying

    def _step_up(self, top: int, n_left: int) -> int:
        """Return the size whose failure leaves no more to try than the failures left can answer.

        Source: the puzzle of two eggs and a tower; with one egg each floor is tried in turn.
        """
        floors = self._floors(top)
        n_trials = 1
        while sum(math.comb(n_trials, i) for i in range(1, n_left + 1)) < len(floors):
            n_trials += 1
        # below it are as many floors as one failure less can answer in one trial less
        n_below = sum(math.comb(n_trials - 1, i) for i in range(1, n_left))
        return floors[min(n_below, len(floors) - 1)]

    def _floors(self, top: int) -> list[int]:
        """Return sizes of which each is the first that leaves less than 95 % in the one before."""
        floors, size = [], self.ok
        while not _is_near(size, top):
            size = (20 * size // 19 // self._align + 1) * self._align
            floors.append(min(size, top))
        return floors or [top]


def apart(points: Sequence[Measured]) -> list[Measured]:
    """Return the last of some sizes, and up to two before it, far enough apart to show a slope.

    Measurements vary: two sizes that lie close tell little of what lies far.
    """
    found = [points[-1]]
    for each in reversed(points[:-1]):
        if 4 * each.size <= 3 * found[0].size and len(found) < 3:
            found = [each, *found]
    return found


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


def _is_near(size: int, largest: int) -> bool:
    return 20 * size >= 19 * largest
