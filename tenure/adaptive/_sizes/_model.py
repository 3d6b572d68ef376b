"""Choose the next size to run from the sizes that ran: ``SizeModel``, for all searches.

Invariant: as long as larger sizes need no less memory, a search ends after `MOST_OOMS` failures at
the most, at a size that worked. It has 95 % of the largest if nothing is measured, and if memory is
convex in the size or goes up in the segments of an allocator. If memory goes up in larger steps,
such as a buffer that doubles, measuring may end the search at half of the largest. With a margin it
goes on after that many failures, with what fits if memory grows with the square of the size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._predicted import Predict, largest_predicted, with_margin
from ._record import Measured, SizeRecord, apart

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
_WORTH_IT = 100
"""A growth below one part in so many is not worth a new size."""
_LEAST_SLOPE = 0.5
"""At least so much of what a size needs grows with it, whatever two measurements say."""
_NOISE = 48
"""The bytes of a size vary by one part in so many."""
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
        record: what is known, which outlives the search; None: nothing.

    Attributes:
        record: what is known.
        n_ooms: how many sizes ran out of memory in this search.
        limit_bytes: the memory that a size may need; None: nobody can tell.
    """

    __slots__ = (
        "_align", "_has_margin", "_high", "_known", "_low", "_predict", "_predicted",
        "limit_bytes", "n_ooms", "record",
    )  # fmt: skip

    def __init__(
        self,
        low: int,
        high: int,
        align: int = 1,
        predict: Predict | None = None,
        *,
        has_margin: bool = False,
        record: SizeRecord | None = None,
    ) -> None:
        self._low, self._high, self._align = low, high, align
        self._has_margin = has_margin
        self._predict = predict
        self._predicted: dict[int, int] = {}
        self.record = SizeRecord() if record is None else record
        # the record as one decision finds it
        self._known = self.record
        self.n_ooms = 0
        self.limit_bytes: int | None = None

    @property
    def ok(self) -> int:
        """The largest size that worked; 0 if none has yet."""
        return self.record.ok

    @property
    def is_measured(self) -> bool:
        """Whether anything is known of what sizes need."""
        return self.limit_bytes is not None and bool(self.record.points)

    # --- what happened

    def ran(self, size: int, needed_bytes: int | None, free_bytes: int | None = None) -> None:
        """Note that a size ran to see what it needs, and needed so much; None: nobody can tell."""
        # a size that needs nothing works elsewhere than on the device that is measured
        if needed_bytes and self.limit_bytes is not None and needed_bytes > self.limit_bytes:
            self.record.note_over(size, needed_bytes)
        else:
            self.record.note_ok(size, needed_bytes, free_bytes, is_trial=True)

    def ran_out(self, size: int, device: str | None = None, free_bytes: int | None = None) -> None:
        """Note that work of this size ran out of memory, of which so much is free without it."""
        self.n_ooms += 1
        self.record.note_failed(size, self._align, device, free_bytes)

    # --- what is next

    def next_size(self, *, is_trial: bool = True) -> int | None:
        """Return the size to run now; None: ``ok`` is the one, or if that is 0 there is none.

        Args:
            is_trial: whether it runs to tell what sizes need, and not for its result.
        """
        self._known = known = self.record.snapshot()
        top = self._top()
        if not known.ok:
            return self._first() if top >= self._low else None
        if known.ok >= top or (top < self._high and _is_near(known.ok, top)):
            return None
        if is_trial and self._wants_the_fixed_part():
            return max(self._low, known.ok // 4 // self._align * self._align)
        wanted = self._wanted(top, is_trial)
        if wanted is None:
            return None
        return max(min(wanted, top) // self._align, known.ok // self._align + 1) * self._align

    def _top(self) -> int:
        """Return the largest size that may fit: below the failed one, unless more is free now."""
        known = self._known
        if known.bad is None or known.is_guess:
            return self._high
        bad = known.bad
        if known.free_bytes and self.limit_bytes is not None:
            bad = max(bad, bad * self.limit_bytes // known.free_bytes)
        return min(self._high, (bad - 1) // self._align * self._align)

    def _first(self) -> int:
        """Return the size to begin with, or to go on with as long as none has worked."""
        if self._predict is None or self.limit_bytes is None or self.n_ooms + 1 >= MOST_OOMS:
            return self._low
        factor = 1.0
        bad = self._known.bad
        if bad is not None:
            factor = _DOUBT * self.limit_bytes / max(1, self._bytes_at(bad))
        most = self._largest_predicted(self._low, max(1.0, factor))
        return max(self._low, most if most >= self._top() else with_margin(most))

    def _wanted(self, top: int, is_trial: bool) -> int | None:
        """Return a size above the one that works, as far as what is known allows it."""
        known, limit_bytes, n_left = self._known, self.limit_bytes, MOST_OOMS - self.n_ooms
        ok, n_surprises = known.ok, known.n_surprises
        below = [each for each in known.points if each.size <= ok]
        if limit_bytes is None or not below:
            if n_left <= 0:
                return None
            return 2 * ok if known.bad is None else self._step_up(top, n_left)
        is_over = n_surprises or self._predict is not None
        if n_left <= 0 and is_over and not self._has_margin:
            return None
        if self._has_margin:
            is_careful = n_surprises > 0 or n_left <= (1 if is_trial else 0)
        else:
            is_careful = n_left <= 1 and self._predict is None and n_surprises < 2
        most, line, likely = self._fitting(
            below, limit_bytes, top, is_careful=is_careful, is_trial=is_trial
        )
        # measuring is believed if it says that no more fits, unless memory may go up in steps
        if most < top and _is_near(ok, most):
            goes_on = not self._has_margin and limit_bytes < 20 * _SEGMENT_BYTES and n_left > 0
            return self._floors(top)[0] if goes_on else None
        wanted = top if likely >= top else with_margin(likely)
        if wanted >= top and self._has_margin and top < self._high:
            has_risen = 8 * limit_bytes > 9 * (known.free_bytes or limit_bytes)
            if not is_trial and n_surprises >= MOST_OOMS and not has_risen:
                # what was measured does not say what fits here, and enough has failed for that
                return None
            # what failed was to fit, and may have failed by far
            wanted = (ok + top) // 2
        step = max(ok // 40, self._align)
        # a square may say that hardly more fits: by steps of one the search would never end
        if is_trial or line >= ok + 2 * step:
            wanted = max(wanted, ok + step)
        elif wanted - ok <= ok // _WORTH_IT:
            return None
        above = self._above()
        if above is not None and above.size == known.bad:
            # it ran beyond the limit: anything below it runs, too
            return wanted if wanted < top else (ok + top) // 2
        if len(below) < 3 or below[-1].n_bytes < 2 * below[-2].n_bytes:
            wanted = min(wanted, _LEAP * ok)
        if not (is_careful or self._has_margin) and (n_surprises or n_left <= 1):
            if n_left > 1 and wanted < top:
                # far from what worked it is a guess, whose failure is not worth what it saves
                return min(wanted, max(2 * ok, wanted // 2))
            return min(wanted, self._step_up(top, n_left))
        return wanted

    # --- what is measured and predicted

    def _wants_the_fixed_part(self) -> bool:
        """Tell whether all that is known is one size, which says that not much more fits."""
        known = self._known
        if len(known.points) != 1 or known.bad is None or self._predict is not None:
            return False
        return known.ok >= 4 * self._low and (self.limit_bytes or 0) < 1.5 * known.points[0].n_bytes

    def _fitting(
        self,
        below: Sequence[Measured],
        limit_bytes: int,
        top: int,
        *,
        is_careful: bool,
        is_trial: bool,
    ) -> tuple[int, int, int]:
        """Return a size above which none fits, what fits by a line, and what likely does."""
        if self._predict is not None:
            factor = max(each.n_bytes / max(1, self._bytes_at(each.size)) for each in below)
            most = self._largest_predicted(self._known.ok, factor)
            # it may be 1 % less than what fits, and `ok` therefore less than 95 % of that
            floor = self._floors(top)[0]
            if most < floor and self._bytes_at(floor) * factor <= limit_bytes:
                most = floor
            return most, most, most
        points = apart(below)
        size, n_bytes = points[-1]
        room = max(0, limit_bytes - n_bytes)
        less, less_bytes = points[-2] if len(points) > 1 else Measured(0, 0)
        if n_bytes <= less_bytes:
            return top, top, min(top, 2 * size) if is_careful else top
        each = (n_bytes - less_bytes) / (size - less)
        if not (less or is_trial) and len(below) > 1:
            # sizes that lie close show a slope too, if that is taken for steeper than it seems
            more_bytes = n_bytes - below[0].n_bytes + n_bytes / _NOISE
            each = min(each, more_bytes / (size - below[0].size))
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
        # one size does not tell how much of its memory is fixed
        return line if less else top, line, min(likely, line)

    def _above(self) -> Measured | None:
        """Return the smallest size that ran and needed more than it should."""
        return next((each for each in self._known.points if each.size > self._known.ok), None)

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
        floors, size = [], self._known.ok
        while not _is_near(size, top):
            size = (20 * size // 19 // self._align + 1) * self._align
            floors.append(min(size, top))
        return floors or [top]


def fitting(points: Sequence[Measured], free_bytes: int) -> int:
    """Return the largest size that fits into less than the last one needs, by what was measured."""
    *before, (size, n_bytes) = apart(points)
    each = n_bytes / size
    if before:
        # the flatter of both lines takes more away, which is the careful way
        less, less_bytes = before[-1]
        each = min(each, max(_LEAST_SLOPE * each, (n_bytes - less_bytes) / (size - less)))
    reached = size - max(0, n_bytes - free_bytes) / each
    # If not even nothing would fit, what two sizes share is not needed by all, as where an
    # allocator rounds both up to one segment. A failure costs less than the smallest size.
    return int((reached if reached >= 1 else size * free_bytes / n_bytes) + 1e-9)


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
