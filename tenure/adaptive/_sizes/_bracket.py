"""The largest size that fits, between one that does and one that does not, with few failures.

Invariant: as long as larger sizes need no less memory, a bracket is closed by `MOST_OOMS` failures
at the most, at a size that worked. It has 95 % of the largest if nothing is measured, and if memory
is convex in the size or goes up in the segments of an allocator. Memory that goes up in larger
steps, such as a buffer that doubles, looks steeper between two sizes than it is: then measuring may
end the search at half of the largest.
"""

from __future__ import annotations

import math
from bisect import insort

from ._policy import with_margin
from ._predicted import Predict, largest_predicted
from ._record import Measured
from ._trials import apart, further

MOST_OOMS = 3
_LEAP = 8
"""A size grows by so much at once, until three sizes have shown what grows.

Memory is convex in the size: where the largest layer takes over from the weights, or where memory
grows with the square of the size, what small sizes have shown is too little.
"""
_SEGMENT_BYTES = 20 << 20
"""What allocators take from a device at once for tensors of a few MiB: memory goes up in steps.

Source: ``kLargeBuffer`` of c10/core/AllocatorConfig.h.
"""
_DOUBT = 4
"""A prediction that was too low is taken to be so by that much more: what runs then, and is to
run, shows by how much."""


class Bracket:
    """What is known of sizes from ``low`` to ``high``, and which to run next.

    Args:
        low: the smallest size that is allowed, a multiple of ``align``.
        high: the largest, likewise.
        align: sizes are multiples of it.
        predict: gives the size to begin with where it is known how much memory there is.

    Attributes:
        ok: the largest size that worked; 0 where none has yet.
        bad: the smallest that did not fit; None where none is known.
        n_ooms: how many sizes ran out of memory.
        limit_bytes: the memory that a size may need; None: nobody can tell.
    """

    __slots__ = (
        "_align", "_has_run_out", "_high", "_low", "_points", "_predict", "_predicted", "bad",
        "limit_bytes", "n_ooms", "ok",
    )  # fmt: skip

    def __init__(self, low: int, high: int, align: int = 1, predict: Predict | None = None) -> None:
        self._low, self._high, self._align = low, high, align
        self._predict = predict
        self._predicted: dict[int, int] = {}
        # of sizes that ran to their end, the smallest first; the last ones may exceed the limit
        self._points: list[Measured] = []
        # whether `bad` has run out of memory, or ran and needed more than it should
        self._has_run_out = False
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
        """Work of this size returned, and needed so much; None: that can't be told."""
        # a size that needs nothing works elsewhere than where is looked
        if needed_bytes:
            self._points = [each for each in self._points if each.size != size]
            insort(self._points, Measured(size, needed_bytes))
        limit_bytes = self.limit_bytes
        if needed_bytes and limit_bytes is not None and needed_bytes > limit_bytes:
            self._note_bad(size, has_run_out=False)
        else:
            self.ok = max(self.ok, size)

    def ran_out(self, size: int) -> None:
        """Work of this size ran out of memory."""
        self.n_ooms += 1
        self._note_bad(size, has_run_out=True)

    def _note_bad(self, size: int, *, has_run_out: bool) -> None:
        if self.bad is None or size <= self.bad:
            self.bad, self._has_run_out = size, has_run_out

    # --- what is next

    def next_size(self) -> int | None:
        """The size to run now; None: ``ok`` is the one, or where that is 0 there is none."""
        top = self._top()
        if not self.ok:
            return self._first() if top >= self._low else None
        if self.ok >= top or self.n_ooms >= MOST_OOMS:
            return None
        if self.bad is not None and _is_near(self.ok, top):
            return None
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
        most = self._largest_predicted(self._low, self._top(), max(1.0, factor))
        return max(self._low, self._short_of(most))

    def _wanted(self, top: int) -> int | None:
        """A size above the one that works, as far as what is known allows it."""
        sure, most = self._told(top)
        if most is None:
            return 2 * self.ok if self.bad is None else self._step_up(top)
        # measuring is believed where it says that no more fits, unless steps are to be expected
        if most < top and _is_near(self.ok, most):
            return self._floors(top)[0] if self._may_go_up_in_steps() else None
        most = self._likely(most)
        wanted = top if most >= top else self._short_of(most)
        ok = self.ok
        if self.bad is None:
            below = self._below()
            if len(below) > 2 and below[-1].n_bytes >= 2 * below[-2].n_bytes:
                # three sizes, of which the last shows what grows
                return wanted
            # by proportion alone little is believed: it says nothing of squares
            is_near = sure <= _LEAP**2 * ok
            return min(wanted, max(self._short_of(sure) if is_near else 0, _LEAP * ok))
        if not self._has_run_out:
            # what ran beyond the limit ran: anything below it does, too
            return max(wanted if wanted < top else self._between(top), ok + ok // 40)
        if self.n_ooms + 1 < MOST_OOMS:
            if wanted < top and self._predict is None:
                # far from what worked it is a guess, whose failure is not worth what it saves
                return min(wanted, max(2 * ok, wanted // 2), _LEAP * ok)
            half = self.bad // 2
            if sure >= half and ok < half:
                # it was to fit, or nearly: the rest is a part of the whole, cut up in segments
                return min(wanted, half, 4 * ok)
        return min(wanted, self._step_up(top))

    def _short_of(self, most: int) -> int:
        """The last size but a margin, or all that is allowed."""
        return most if most >= self._top() else with_margin(most)

    # --- what is measured and predicted

    def _told(self, top: int) -> tuple[int, int | None]:
        """The size that fits by proportion, and one above which none does; None: nothing is told.

        By proportion, since a part of the memory is fixed; and by a line through two sizes, since
        memory is convex in the size.
        """
        limit_bytes, below = self.limit_bytes, self._below()
        if limit_bytes is None or not below:
            return self.ok, None
        size, n_bytes = below[-1]
        if self._predict is not None:
            factor = max(each.n_bytes / max(1, self._bytes_at(each.size)) for each in below)
            most = self._largest_predicted(self.ok, top, factor)
            # it may be 1 % less than what fits, and `ok` therefore less than 95 % of that
            floor = self._floors(top)[0]
            if most < floor and self._bytes_at(floor) * factor <= limit_bytes:
                most = floor
            return most, most
        slope = self._slope(below)
        most = top if slope <= 0 else size + int((limit_bytes - n_bytes) / slope + 1e-9)
        return min(size * limit_bytes // n_bytes, most), most

    def _likely(self, most: int) -> int:
        """The size that just fits by a square through three sizes, where memory is convex."""
        limit_bytes, below, above = self.limit_bytes, self._below(), self._above()
        points = apart(below)
        if above is not None:
            points = [above, *points[-2:]]
        if self._predict is not None or limit_bytes is None or len(points) < 3:
            return most
        size, n_bytes = points[-1]
        if n_bytes <= points[-2].n_bytes:
            return most
        return min(most, size + int(further(points, max(0, limit_bytes - n_bytes)) + 1e-9))

    def _between(self, top: int) -> int:
        """A size between what fits by a line to what ran beyond the limit, and that."""
        limit_bytes, below, above = self.limit_bytes, self._below(), self._above()
        if limit_bytes is None or not below or above is None:
            return (self.ok + top) // 2
        fits = below[-1].size + int((limit_bytes - below[-1].n_bytes) / _slope_of(above, below[-1]))
        return (min(fits, top) + top) // 2

    def _below(self) -> list[Measured]:
        return [each for each in self._points if each.size <= self.ok]

    def _above(self) -> Measured | None:
        """The smallest size that ran and needed more than it should."""
        return next((each for each in self._points if each.size > self.ok), None)

    def _slope(self, below: list[Measured]) -> float:
        """What one more needs, at the least, by two sizes; 0 where there is only one."""
        *earlier, last = apart(below)
        earlier = earlier or below[:-1]
        return _slope_of(last, earlier[-1]) if earlier else 0.0

    def _may_go_up_in_steps(self) -> bool:
        """Whether a segment of an allocator may be over 5 % of the memory."""
        return self.limit_bytes is not None and self.limit_bytes < 20 * _SEGMENT_BYTES

    def _bytes_at(self, size: int) -> int:
        assert self._predict is not None
        if size not in self._predicted:
            self._predicted[size] = self._predict(size)
        return self._predicted[size]

    def _largest_predicted(self, low: int, high: int, factor: float) -> int:
        """The largest size whose prediction fits, at least ``low``."""
        assert self.limit_bytes is not None
        return largest_predicted(self._bytes_at, low, high, self.limit_bytes / factor, self._align)

    # --- by trying

    def _step_up(self, top: int) -> int:
        """The size whose failure leaves no more to be tried than the failures left can answer.

        Source: the puzzle of two eggs and a tower; with one egg each floor is tried in turn.
        """
        n_left = MOST_OOMS - self.n_ooms
        floors = self._floors(top)
        n_trials = 1
        while sum(math.comb(n_trials, i) for i in range(1, n_left + 1)) < len(floors):
            n_trials += 1
        # below it are as many floors as one failure less can answer in one trial less
        n_below = sum(math.comb(n_trials - 1, i) for i in range(1, n_left))
        return floors[min(n_below, len(floors) - 1)]

    def _floors(self, top: int) -> list[int]:
        """Sizes of which each is the first that leaves less than 95 % in the one before."""
        floors, size = [], self.ok
        while not _is_near(size, top):
            size = (20 * size // 19 // self._align + 1) * self._align
            floors.append(min(size, top))
        return floors or [top]


def _slope_of(one: Measured, other: Measured) -> float:
    return (one.n_bytes - other.n_bytes) / (one.size - other.size)


def _is_near(size: int, largest: int) -> bool:
    return 20 * size >= 19 * largest
