"""What is known about the sizes of one piece of work.

Invariant: ``ok`` worked and ``bad``, above it, did not; a size that works although it is ``bad``
shows that memory has come free, and one that fails although it is ``ok`` that it has gone. What is
tried next is not said here: that is the policy's, a function of what is.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import NamedTuple

_FIRST_INTERVAL = 16
CLOSED_INTERVAL = 512
"""Clean calls before what failed is tried again where nothing lies between it and what works."""
_WITH_LESS_ROOM = 4
"""Work that finds less memory free begins with one part in so many of what fitted."""
_FINE = 20
"""A step up is one part in so many: what fails ends the search, within 5 % of the largest."""

# one for all records: a note is a few assignments, and a lock of its own would outweigh a record
_lock = threading.RLock()


class Measured(NamedTuple):
    """What a size needed.

    Attributes:
        size: the size.
        n_bytes: the most memory that was in use for it at once.
    """

    size: int
    n_bytes: int


class Failed(NamedTuple):
    """A size that failed.

    Attributes:
        size: the size.
        free_bytes: what was free then; None where that is not known.
    """

    size: int
    free_bytes: int | None


@dataclass(slots=True)
class SizeRecord:
    """The memory of one site; threads may share it.

    Attributes:
        ok: the largest size that worked since something this small last failed; 0 where none did.
        bad: the smallest size that is known to fail; None where none is.
        points: what ``ok`` needs at the most, and before it what a smaller size needed, where that
            was measured; empty where ``ok`` was not.
        is_steep: whether larger sizes may need memory with their square: one that was to fit, by
            what smaller ones needed, did not.
        n_failed: failures since more memory was seen to be free; `is_steep` says whether one of
            them was of a size that was to fit.
        is_guess: whether ``bad`` failed in work of another shape, or was only predicted to fail.
        free_bytes: the memory that was free when ``bad`` failed; None where that is not known.
        least_free_bytes: the least that was free when work of ``ok`` began that returned; None
            where that is not known.
        device: the memory that ran out, as torch spells it.
        n_clean: calls without a failure since the last one, or since the last growth ended.
        interval: clean calls before a larger size is tried.
        climbing: whether the next call tries a larger size.
        failed: what is known to fail, the smallest first.
    """

    ok: int = 0
    bad: int | None = None
    points: tuple[Measured, ...] = ()
    is_steep: bool = False
    n_failed: int = 0
    is_guess: bool = False
    free_bytes: int | None = None
    least_free_bytes: int | None = None
    device: str | None = None
    n_clean: int = 0
    interval: int = _FIRST_INTERVAL
    climbing: bool = False
    failed: tuple[Failed, ...] = ()

    def snapshot(self) -> SizeRecord:
        """All that it says at one moment, whatever other threads note meanwhile."""
        with _lock:
            return replace(self)

    def copy(self, *, has_less_room: bool = False) -> SizeRecord:
        """What this one knows of sizes, as the beginning of another for work of another shape.

        What a size needs is another then. Clean calls count on, so that sizes grow also where no
        two calls have the same shape.

        Args:
            has_less_room: whether that work finds less memory free: it begins with a small size
                that surely fits, is measured, and tells how large the next may be.
        """
        with _lock:
            ok = max(1, self.ok // _WITH_LESS_ROOM) if self.ok and has_less_room else self.ok
            return replace(
                self, ok=ok, points=(), is_steep=False, is_guess=True, least_free_bytes=None
            )

    def step(self, align: int) -> int:
        """How much larger the next size is."""
        return max(align, self.ok // _FINE // align * align)

    def note_ok(
        self, size: int, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> bool:
        """Work of this size returned, begun with so much free; whether none as large had worked."""
        with _lock:
            grew = 0 < self.ok < size
            if size >= self.ok:
                self._note_room(size, free_bytes)
                self.points = self._points_with(size, needed_bytes)
                self.ok = size
            elif needed_bytes and self.points:
                self._note_less(size, needed_bytes)
            if self.bad is not None and size >= self.bad:
                # memory has come free: go on at once, and faster
                self.failed = tuple(each for each in self.failed if each.size > size)
                self.bad, self.climbing, self.n_failed = None, True, 0
                # so much as was measured, where it was: memory comes and goes with what a loader
                # fetches ahead, and what failed far above would fail each time
                if self.failed and self.points:
                    self.bad, self.free_bytes = self.failed[0]
            return grew

    def _note_room(self, size: int, free_bytes: int | None) -> None:
        known_bytes = self.least_free_bytes if size == self.ok else None
        told = [each for each in (free_bytes, known_bytes) if each is not None]
        self.least_free_bytes = min(told, default=None)

    def _points_with(self, size: int, needed_bytes: int | None) -> tuple[Measured, ...]:
        if needed_bytes:
            # one that needed more had something beside it, such as what is verified at first
            smaller = [p for p in self.points if p.size < size and p.n_bytes <= needed_bytes]
            return (*smaller[-1:], Measured(size, needed_bytes))
        if not (self.points and self.ok):
            return ()
        # in proportion to the one that was measured: an upper bound, whatever part of it is fixed
        return (Measured(size, -(-self.points[-1].n_bytes * size // self.ok)),)

    def _note_less(self, size: int, needed_bytes: int) -> None:
        """A smaller size says that ``ok`` needs less than it did, as where gradients are there."""
        least = Measured(self.ok, -(-needed_bytes * self.ok // size))
        if least.n_bytes < self.points[-1].n_bytes:
            self.points = (least,)

    def note_failed(
        self, size: int, align: int, device: str | None, free_bytes: int | None = None
    ) -> None:
        """Work of this size ran out of memory, of which so much is free when it is let go."""
        with _lock:
            was_probe = 0 < self.ok < size
            self.n_failed += 1
            if not was_probe:
                self.ok, self.points, self.least_free_bytes = 0, (), None
            elif self.points:
                self.is_steep = True
            self.bad, self.device, self.free_bytes = size, device, free_bytes
            self.failed = (Failed(size, free_bytes), *(f for f in self.failed if f.size > size))
            self.is_guess = False
            if self.climbing:
                # each failure above what works doubles the wait for the next: failures grow with
                # the logarithm of the calls, see test_failures_grow_with_the_logarithm_of_the_calls
                self.interval *= 2
            is_closed = was_probe and size - self.ok <= self.step(align)
            self._rest(CLOSED_INTERVAL if is_closed else 0)

    def forget(self) -> None:
        """Not even the smallest size fits: that says how little memory there was, and of no size.

        A later call has other memory, or fails again; from the smallest size up it would be slow
        for long.
        """
        with _lock:
            self.ok, self.bad, self.points, self.failed = 0, None, (), ()
            self.is_guess = self.is_steep = self.climbing = False
            self.n_failed, self.free_bytes, self.least_free_bytes = 0, None, None

    def note_predicted(self, too_large: int | None, device: str, free_bytes: int) -> None:
        """A prediction was asked where nothing was known: this size is not worth a try.

        Args:
            too_large: the size that is predicted to fail; None: all that is allowed fits.
            device: the memory that would run out.
            free_bytes: what is free of it.
        """
        with _lock:
            self.ok, self.points, self.least_free_bytes = 0, (), None
            self.bad, self.device, self.free_bytes = too_large, device, free_bytes
            # measuring may show that it fits, as of compiled code that keeps less than was written
            self.is_guess = too_large is not None

    def note_clean_call(self, size: int, ceiling: int) -> None:
        """A call, or many pieces of one, ended without a failure at ``size``."""
        with _lock:
            if size >= ceiling:
                self.n_clean, self.climbing = 0, False
            elif not self.climbing:
                self.n_clean += 1

    def note_climbing(self) -> None:
        """A size above ``ok`` is tried now, and from call to call until one fails."""
        with _lock:
            self.climbing = True

    def note_risen(self, free_bytes: int) -> None:
        """More memory is free than when a size failed: what failed may fit now."""
        with _lock:
            self.free_bytes, self.climbing, self.n_failed = free_bytes, True, 0

    def note_largest(self) -> None:
        """Measuring says that no larger size fits."""
        with _lock:
            self._rest(CLOSED_INTERVAL)

    def _rest(self, at_least: int) -> None:
        self.climbing, self.n_clean = False, 0
        self.interval = max(self.interval, at_least)
