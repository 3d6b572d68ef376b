"""What is known about the sizes of one piece of work, and when a larger one is worth a try.

Invariant: ``ok`` worked and ``bad``, above it, did not; a size that works although it is ``bad``
shows that memory has come free, and one that fails although it is ``ok`` that it has gone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from ._policy import Measured

_FIRST_INTERVAL = 16
_CLOSED_INTERVAL = 512
"""Clean calls before what failed is tried again where nothing lies between it and what works."""
_FINE = 20
"""A step up is one part in so many: what fails ends the search, within 5 % of the largest."""

_lock = threading.RLock()


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
        is_guess: whether ``bad`` failed in work of another shape.
        free_bytes: the memory that was free when ``bad`` failed; None where that is not known.
        device: the memory that ran out, as torch spells it.
        n_clean: calls without a failure since the last one, or since the last growth ended.
        interval: clean calls before a larger size is tried.
        climbing: whether the next call tries a larger size.
        settled: whether ``ok`` is as near to the largest as measuring can tell.
    """

    ok: int = 0
    bad: int | None = None
    points: tuple[Measured, ...] = ()
    is_steep: bool = False
    is_guess: bool = False
    free_bytes: int | None = None
    device: str | None = None
    n_clean: int = 0
    interval: int = _FIRST_INTERVAL
    climbing: bool = False
    settled: bool = False

    def snapshot(self) -> SizeRecord:
        """All that it says at one moment, whatever other threads note meanwhile."""
        with _lock:
            return replace(self)

    def fails_at(self, free_bytes: int) -> int | None:
        """The size that is to fail in so much memory: ``bad``, or more where more is free now.

        None where nobody knows.
        """
        if self.is_guess:
            return None
        if self.bad is None or not self.free_bytes:
            return self.bad
        return max(self.bad, self.bad * free_bytes // self.free_bytes)

    def copy(self) -> SizeRecord:
        """What this one knows of sizes, as the beginning of another for work of another shape.

        What a size needs is another then. Clean calls count on, so that sizes grow also where no
        two calls have the same shape.
        """
        with _lock:
            return replace(self, points=(), is_steep=False, is_guess=True, settled=False)

    # --- what to try

    def start(self, first: int, ceiling: int, align: int) -> int:
        """The size that a call begins with.

        Args:
            first: the size where nothing is known.
            ceiling: the largest that is allowed.
            align: sizes are multiples of it.
        """
        with _lock:
            if self.bad is None and not self.climbing and self.ok < first:
                return first
            if self.ok:
                return (
                    self._grown(ceiling, align) if self.is_due(ceiling) else min(self.ok, ceiling)
                )
            return first if self.bad is None or first < self.bad else self._untried(first, align)

    def is_due(self, ceiling: int) -> bool:
        """Whether a size above ``ok`` is worth the risk now."""
        return 0 < self.ok < ceiling and (self.climbing or self.n_clean >= self.interval)

    def _grown(self, ceiling: int, align: int) -> int:
        self.climbing = True
        if self.bad is None:
            wanted = 2 * self.ok
        else:  # what failed may have been a last piece, which is no multiple
            wanted = min(-(-self.bad // align) * align, self.ok + self.step(align))
        return min(ceiling, max(wanted, self.ok + 1))

    def _untried(self, first: int, align: int) -> int:
        assert self.bad is not None
        return min(first, max(align, self.bad // 2 // align * align))

    def step(self, align: int) -> int:
        """How much larger the next size is."""
        return max(align, self.ok // _FINE // align * align)

    def is_closed(self, align: int) -> bool:
        """Whether nothing worth a try lies between what works and what fails."""
        if self.bad is None:
            return False
        return self.settled or self.bad - self.ok <= self.step(align)

    # --- what happened

    def note_ok(self, size: int, needed_bytes: int | None = None) -> bool:
        """Work of this size returned; whether that is larger than what is known to work."""
        with _lock:
            grew = 0 < self.ok < size
            if size >= self.ok:
                self.points = self._points_with(size, needed_bytes)
                self.ok = size
            elif needed_bytes and self.points:
                self._note_less(size, needed_bytes)
            if self.bad is not None and size >= self.bad:
                self.bad = None  # memory has come free: go on at once, and faster
                self.climbing = True
                self.settled = False
            return grew

    def _points_with(self, size: int, needed_bytes: int | None) -> tuple[Measured, ...]:
        if not needed_bytes:
            upper_bytes = self._in_proportion(size)
            return (Measured(size, upper_bytes),) if upper_bytes else ()
        smaller = [each for each in self.points if each.size < size]
        return (*smaller[-1:], Measured(size, needed_bytes))

    def _note_less(self, size: int, needed_bytes: int) -> None:
        """A smaller size says that ``ok`` needs less than it did, as where gradients are there."""
        least = Measured(self.ok, -(-needed_bytes * self.ok // size))
        if least.n_bytes < self.points[-1].n_bytes:
            self.points = (least,)

    def is_full(self, free_bytes: int) -> bool:
        """Whether one more than ``ok`` is known not to fit."""
        with _lock:
            if not self.points:
                return False
            *earlier, (size, n_bytes) = self.points
            slopes = [(n_bytes - less_bytes) / (size - less) for less, less_bytes in earlier]
            return n_bytes + max([*slopes, 0]) > free_bytes

    def _in_proportion(self, size: int) -> int | None:
        """An upper bound of what a larger size needs."""
        return -(-self.points[-1].n_bytes * size // self.ok) if self.points and self.ok else None

    def note_failed(
        self, size: int, align: int, device: str | None, free_bytes: int | None = None
    ) -> None:
        """Work of this size ran out of memory, of which so much is free when it is let go."""
        with _lock:
            was_probe = 0 < self.ok < size
            if not was_probe:
                self.ok, self.points = 0, ()
            elif self.points:
                self.is_steep = True
            self.bad, self.device, self.free_bytes = size, device, free_bytes
            self.is_guess = False
            self.settled = False
            if self.climbing:
                self.interval *= 2
            self._rest(_CLOSED_INTERVAL if was_probe and self.is_closed(align) else 0)

    def note_clean_call(self, size: int, ceiling: int) -> None:
        """A call, or many pieces of one, ended without a failure at ``size``."""
        with _lock:
            if size >= ceiling:
                self.n_clean, self.climbing = 0, False
            elif not self.climbing:
                self.n_clean += 1

    def note_risen(self, free_bytes: int) -> None:
        """More memory is free than when a size failed: what failed may fit now."""
        with _lock:
            self.free_bytes = free_bytes
            self.climbing, self.settled = True, False

    def note_settled(self) -> None:
        """Measuring says that no larger size fits."""
        with _lock:
            self.settled = True
            self._rest(_CLOSED_INTERVAL)

    def _rest(self, at_least: int) -> None:
        self.climbing, self.n_clean = False, 0
        self.interval = max(self.interval, at_least)
