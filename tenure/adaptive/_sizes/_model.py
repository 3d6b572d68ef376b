"""What is known of the sizes of one piece of work, and which size follows: ``SizeModel``.

Invariant: ``ok`` worked and ``bad``, above it, did not. As long as larger sizes need no less
memory, a search ends after `MOST_FAILURES` failures at the most, at a size that worked and is at
least 95 % of the largest: a size follows from the bytes of two others by the line through them, and
each failure makes the next step smaller.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import NamedTuple

MOST_FAILURES = 3
_MARGIN = 48
"""A size that is computed is made smaller by one part in so many, because memory varies."""
_STEPS = (2, 4, 20)
"""After so many failures the next size is larger by one part in so many, at most."""
_LEAP = 8
"""A size grows by so much at once: the largest layer may take over from the weights, or memory may
grow with the square of the size."""
_FINE = 40
"""A growth below one part in so many is not worth a new size, if no more than that seems to fit."""
_SEGMENTS_BYTES = 400 << 20
"""Below this a segment of an allocator, of 20 MiB, is more than a step: see ``kLargeBuffer`` of
c10/core/AllocatorConfig.h."""
_FIRST_INTERVAL = 16
_CLOSED_INTERVAL = 512
"""Clean calls before what failed is tried again where nothing lies between it and what works."""
_WITH_LESS_ROOM = 4
"""Work that finds less memory free begins with one part in so many of what fitted."""
_RISE_BYTES = 1 << 28
"""Memory that came free has to be so much to count, where nothing tells what a size needs."""

# one for all: a note is a few assignments, and a lock of its own would outweigh a model
_lock = threading.RLock()


class Measured(NamedTuple):
    """A size, and the most memory that was in use for it at once."""

    size: int
    n_bytes: int


class SizeRange(NamedTuple):
    """The sizes from ``low`` to ``high`` that are multiples of ``align``, as both are."""

    low: int
    high: int
    align: int = 1


@dataclass(slots=True)
class SizeModel:
    """The memory of one site, for all of its calls; threads may share it.

    Attributes:
        ok: the largest size that worked since something this small last failed; 0 where none did.
        bad: the smallest size that is known not to fit; None where none is.
        needed_bytes: what ``ok`` needs at the most; None where that was not measured.
        other: a smaller size that was measured, or one that ran and needed more than it should.
        n_surprises: failures above a size that worked, so that something spoke for them, since
            more memory was seen to be free.
        is_guess: whether ``bad`` failed in work of another shape, when less memory was free, or was
            only predicted to fail.
        free_bytes: the memory that was free when ``bad`` failed; None where that is not known.
        least_free_bytes: the least that was free when work of ``ok`` began that returned; None
            where that is not known.
        device: the memory that ran out, as torch spells it.
        n_clean: calls without a failure since the last one.
        interval: clean calls before a larger size is tried, where nothing is measured.
        most_samples: the largest batch of a step.
    """

    ok: int = 0
    bad: int | None = None
    needed_bytes: int | None = None
    other: Measured | None = None
    n_surprises: int = 0
    is_guess: bool = False
    free_bytes: int | None = None
    least_free_bytes: int | None = None
    device: str | None = None
    n_clean: int = 0
    interval: int = _FIRST_INTERVAL
    most_samples: int = 0

    def snapshot(self) -> SizeModel:
        """Return a consistent copy, whatever other threads note meanwhile."""
        with _lock:
            return replace(self)

    def for_other_work(self, *, has_less_room: bool = False) -> SizeModel:
        """Return a copy of the sizes, to begin with in work of another shape.

        What a size needs is another then. Clean calls count on, so that sizes grow also where no
        two calls have the same shape.

        Args:
            has_less_room: whether that work finds less memory free: it begins with a small size
                that surely fits, is measured, and tells how large the next may be.
        """
        with _lock:
            ok = max(1, self.ok // _WITH_LESS_ROOM) if self.ok and has_less_room else self.ok
            known = replace(self, ok=ok, n_surprises=0, is_guess=True)
        known.needed_bytes = known.other = known.least_free_bytes = None
        return known

    # --- a call begins

    def start(self, first: int, ceiling: int, align: int) -> int:
        """Return the size that a call begins with, whatever memory is free.

        Args:
            first: the size where nothing is known.
            ceiling: the largest that is allowed.
            align: sizes are multiples of it.
        """
        with _lock:
            if self.is_due(ceiling):
                return self._grown(ceiling, align)
            # larger than all that were tried: nothing speaks against it yet
            if self.bad is None and self.ok < first:
                return first
            if self.ok:
                return min(self.ok, ceiling)
            if self.bad is None or first < self.bad:
                return first
            return min(first, max(align, self.bad // 2 // align * align))

    def is_due(self, ceiling: int) -> bool:
        """Tell whether a size above the one that works is worth the risk: measuring would tell."""
        is_clean = self.needed_bytes is None and self.n_clean >= self.interval
        return is_clean and 0 < self.ok < ceiling

    def _grown(self, ceiling: int, align: int) -> int:
        wanted = 2 * self.ok
        if self.bad is not None:
            # what failed may have been a last piece, which is no multiple
            wanted = min(-(-self.bad // align) * align, self.ok + self._step(align))
        return min(ceiling, max(wanted, self.ok + 1))

    def _step(self, align: int) -> int:
        return max(align, self.ok // _STEPS[-1] // align * align)

    def has_risen(self, free_bytes: int) -> bool:
        """Note whether so much more memory is free than when a size failed that it may fit now."""
        with _lock:
            then_bytes = self.free_bytes
            if then_bytes is None or free_bytes - then_bytes <= max(_RISE_BYTES, then_bytes // 8):
                return False
            self.free_bytes, self.n_surprises = free_bytes, 0
            self.n_clean = max(self.n_clean, self.interval)
            return True

    # --- what happened

    def ran(
        self, size: int, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> bool:
        """Note that work of this size returned; return whether it grew.

        Args:
            size: the size.
            needed_bytes: what it needed; None where that is not known.
            free_bytes: what was free before; None where that is not known.
        """
        with _lock:
            grew = 0 < self.ok < size
            if size >= self.ok:
                known_bytes = self.least_free_bytes if size == self.ok else None
                told = [each for each in (free_bytes, known_bytes) if each is not None]
                self.least_free_bytes = min(told, default=None)
                self._measure(size, needed_bytes)
                self.ok = size
            elif needed_bytes and self.needed_bytes:
                least_bytes = -(-needed_bytes * self.ok // size)
                if least_bytes < self.needed_bytes:
                    # as if it had made gradients that are there now
                    self.needed_bytes, self.other = least_bytes, None
            if self.bad is not None and size >= self.bad:
                # memory has come free: go on at once, by what was measured if it was, because
                # memory comes and goes with what a loader fetches ahead, and what failed far above
                # would fail each time
                self.n_surprises, self.is_guess = 0, self.needed_bytes is not None
                self.bad = size + 1 if self.is_guess else None
                self.n_clean = max(self.n_clean, self.interval)
            return grew

    def _measure(self, size: int, needed_bytes: int | None) -> None:
        known_bytes, other = self.needed_bytes, self.other
        if not needed_bytes:
            if known_bytes and size > self.ok:
                # in proportion: an upper bound, whatever part of it is fixed
                self.needed_bytes, self.other = -(-known_bytes * size // self.ok), None
            return
        if known_bytes and size > self.ok:
            is_far = 4 * self.ok <= 3 * size
            is_between = other is not None and other.size > size
            if (is_far or other is None) and not is_between:
                other = Measured(self.ok, known_bytes)
        # one that needed more had something beside it, such as what is verified at first
        if other is not None and other.size < size and other.n_bytes > needed_bytes:
            other = None
        self.needed_bytes, self.other = needed_bytes, other

    def ran_part(self, size: int, needed_bytes: int) -> bool:
        """Note what a smaller size than ``ok`` needed; return whether it shows what grows."""
        with _lock:
            is_less = size < self.ok and needed_bytes < (self.needed_bytes or 0)
            if is_less:
                self.other = Measured(size, needed_bytes)
            return is_less

    def ran_over(self, size: int, needed_bytes: int) -> None:
        """Note that work of this size returned, and needed more than it should."""
        with _lock:
            self.bad, self.other = size, Measured(size, needed_bytes)

    def ran_out(
        self, size: int, align: int = 1, device: str | None = None, free_bytes: int | None = None
    ) -> None:
        """Note that work of this size ran out of memory, of which so much is free without it."""
        with _lock:
            is_surprise = 0 < self.ok < size
            if is_surprise:
                self.n_surprises += 1
                # failures above what works grow with the logarithm of the calls
                is_closed = size - self.ok <= self._step(align)
                self.interval = max(2 * self.interval, _CLOSED_INTERVAL if is_closed else 0)
            else:
                self.ok = self.n_surprises = 0
                self.needed_bytes = self.other = self.least_free_bytes = None
            self.bad, self.device, self.free_bytes = size, device, free_bytes
            self.is_guess, self.n_clean = False, 0

    def forget(self) -> None:
        """Not even the smallest size fits: that says how little memory there was, and of no size.

        A later call has other memory, or fails again; from the smallest size up it would be slow
        for long.
        """
        with _lock:
            self.ok, self.bad, self.is_guess, self.n_surprises = 0, None, False, 0
            self.needed_bytes = self.other = self.free_bytes = self.least_free_bytes = None

    def note_predicted(self, too_large: int | None, device: str, free_bytes: int) -> None:
        """Note that a prediction ruled out this size, when nothing else was known.

        Args:
            too_large: the size that is predicted to fail; None: all that is allowed fits.
            device: the memory that would run out.
            free_bytes: what is free of it.
        """
        with _lock:
            self.forget()
            self.bad, self.device, self.free_bytes = too_large, device, free_bytes
            # measuring may show that it fits, as of compiled code that keeps less than was written
            self.is_guess = too_large is not None

    def note_clean_call(self, ceiling: int) -> None:
        """Note that a call, or many pieces of one, ended without a failure."""
        with _lock:
            self.n_clean = 0 if self.ok >= ceiling else self.n_clean + 1

    # --- what is next

    def next_size(
        self,
        sizes: SizeRange,
        limit_bytes: int | None,
        n_failed: int | None = None,
        *,
        is_flat: bool = False,
    ) -> int | None:
        """Return the size above ``ok`` to run now; None: ``ok`` is the one.

        Args:
            sizes: those that are allowed.
            limit_bytes: the memory that a size may need; None: nobody can tell.
            n_failed: how many sizes have failed in a search that ends after `MOST_FAILURES`; None:
                what counts are surprises, and after three nothing is tried until more is free.
            is_flat: whether a smaller size needed no less memory.
        """
        with _lock:
            ok, top = self.ok, self._top(sizes, limit_bytes)
            has_risen = 8 * (limit_bytes or 0) > 9 * (self.free_bytes or limit_bytes or 0)
            least = self.n_surprises - has_risen if n_failed is None else n_failed
            is_near = top < sizes.high and 20 * ok >= 19 * top
            if ok >= top or is_near or least >= MOST_FAILURES:
                return None
            if limit_bytes is None or self.needed_bytes is None:
                wanted: int | None = 2 * ok if self.bad is None else self._stepped(top, least)
            else:
                wanted = self._by_line(sizes, limit_bytes, top, least)
                if n_failed is not None:
                    wanted = self._searching(wanted, limit_bytes, top)
                elif (
                    self.other is None
                    and (is_flat or ok < 2 * sizes.low)
                    and limit_bytes > self.needed_bytes
                ):
                    # no smaller size shows what is fixed: a larger one does
                    wanted = max(wanted or 0, self._stepped(top, 1))
            if wanted is None:
                return None
            return max(min(wanted, top) // sizes.align, ok // sizes.align + 1) * sizes.align

    def _searching(self, wanted: int | None, limit_bytes: int, top: int) -> int | None:
        """Return the size of a search, which is to end near the largest whatever measuring says."""
        if wanted is not None:
            return wanted
        less = self.ok if self.other is None else self.other.size
        # one size does not show what is fixed, nor any what fits if memory goes up in segments
        is_shown = limit_bytes >= _SEGMENTS_BYTES and 4 * less <= 3 * self.ok
        return None if is_shown else self._stepped(top, MOST_FAILURES - 1)

    def with_fixed_part(self, sizes: SizeRange, limit_bytes: int) -> int | None:
        """Return a smaller size that shows what of the bytes is fixed, if that matters now."""
        ok, needed_bytes = self.ok, self.needed_bytes or 0
        if self.other is not None or ok < 2 * sizes.low or limit_bytes >= 1.5 * needed_bytes:
            return None
        return max(sizes.low, ok // 4 // sizes.align * sizes.align)

    def _top(self, sizes: SizeRange, limit_bytes: int | None) -> int:
        """Return the largest size that may fit: below the failed one, unless more is free now."""
        bad = self.bad
        if bad is None or self.is_guess:
            return sizes.high
        if self.free_bytes and limit_bytes is not None:
            bad = max(bad, bad * limit_bytes // self.free_bytes)
        return min(sizes.high, (bad - 1) // sizes.align * sizes.align)

    def _stepped(self, top: int, n_failed: int) -> int:
        """Return a size whose failure leaves less to try: at most halfway to what has failed."""
        if not n_failed:
            return (self.ok + top) // 2
        # rounded up, so that the last failure leaves 95 %
        return min(
            -(-self.ok * (_STEPS[n_failed] + 1) // _STEPS[n_failed]), (self.ok + top + 1) // 2
        )

    def _by_line(self, sizes: SizeRange, limit_bytes: int, top: int, n_failed: int) -> int | None:
        """Return the size that fits by what was measured; None if hardly more does."""
        ok, other = self.ok, self.other
        needed_bytes = self.needed_bytes or 0
        room = limit_bytes - needed_bytes
        slope, less = needed_bytes / ok, 0
        if other is not None:
            rise = (needed_bytes - other.n_bytes) / (ok - other.size)
            # sizes that lie close show a slope too, if it is taken for steeper than it seems
            if 3 * ok < 4 * other.size < 4 * ok:
                rise = min(slope, rise + needed_bytes / _MARGIN / (ok - other.size))
            slope, less = rise, min(other.size, ok)
        if slope <= 0:
            line = likely = top if room >= 0 else ok
        else:
            line = likely = ok + math.floor(room / slope + 1e-9)
            if room > 0 and (self.n_surprises or n_failed >= MOST_FAILURES - 1):
                # it fits also if memory grows with the square of the size
                likely = math.floor(math.sqrt(ok**2 + room * (ok + less) / slope) + 1e-9)
        wanted = top if likely >= top else with_margin(likely)
        step = max(ok // _FINE, sizes.align)
        # a square may say that hardly more fits: by steps of one the search would never end
        if line >= ok + step + ok // _FINE:
            wanted = max(wanted, ok + step)
        elif wanted - ok <= ok // 100:
            return None
        wanted = min(wanted, _LEAP * ok)
        # what is below a size that ran beyond the limit runs, too
        n_steps = 0 if other is not None and other.size > ok else n_failed
        if n_steps >= MOST_FAILURES - 1 or (wanted >= top and top < sizes.high):
            # what failed was to fit, so that measuring is not to be believed
            wanted = min(wanted, self._stepped(top, n_steps))
        return wanted

    def fitting(self, free_bytes: int) -> int | None:
        """Return the size that fits into less than ``ok`` needs; None if nothing was measured."""
        if self.needed_bytes is None:
            return None
        size, n_bytes, other = self.ok, self.needed_bytes, self.other
        each = n_bytes / size
        if other is not None:
            # the flatter of both lines takes more away, which is the careful way
            each = min(each, max(each / 2, (n_bytes - other.n_bytes) / (size - other.size)))
        reached = size - max(0, n_bytes - free_bytes) / each
        # If not even nothing would fit, what two sizes share is not needed by all, as where an
        # allocator rounds both up to one segment. A failure costs less than the smallest size.
        return int((reached if reached >= 1 else size * free_bytes / n_bytes) + 1e-9)


def with_margin(size: int) -> int:
    """Return a size that measuring or predicting says fits, as one that surely does."""
    return size - size // _MARGIN
