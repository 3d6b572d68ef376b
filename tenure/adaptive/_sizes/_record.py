"""What is known about the sizes of one piece of work, and when a larger one is worth a try.

Invariant: ``ok`` worked and ``bad``, above it, did not; a size that works although it is ``bad``
shows that memory has come free, and one that fails although it is ``ok`` that it has gone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

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
        ok_bytes: device memory that ``ok`` needs at the most; None where that was not measured.
        bytes_per_size: what one more than ``ok`` needs at the least; 0 where two sizes were not
            measured yet.
        free_bytes: the memory that was free when a size failed; None where that is not known.
        device: the memory that ran out, as torch spells it.
        n_clean: calls without a failure since the last one, or since the last growth ended.
        interval: clean calls before a larger size is tried.
        climbing: whether the next call tries a larger size.
        settled: whether ``ok`` is as near to the largest as measuring can tell.
    """

    ok: int = 0
    bad: int | None = None
    ok_bytes: int | None = None
    bytes_per_size: float = 0
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

    def fitting(self, free_bytes: int) -> int | None:
        """The size that surely fits into so much, by what ``ok`` needs; None where nobody knows.

        Memory that grows with the size, along a line or steeper where it is large already, grows
        at most in proportion.
        """
        with _lock:
            return self.ok * free_bytes // self.ok_bytes if self.ok_bytes else None

    def copy(self) -> SizeRecord:
        """What this one knows of sizes, as the beginning of another for work of another shape.

        What a size needs is another then. Clean calls count on, so that sizes grow also where no
        two calls have the same shape.
        """
        with _lock:
            return replace(self, ok_bytes=None, bytes_per_size=0, settled=False)

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
                self._note_growth(size, needed_bytes)
                self.ok_bytes = needed_bytes or self._in_proportion(size)
                self.ok = size
            if self.bad is not None and size >= self.bad:
                self.bad = None  # memory has come free: go on at once, and faster
                self.climbing = True
                self.settled = False
            return grew

    def _note_growth(self, size: int, needed_bytes: int | None) -> None:
        """Memory grows along a line or steeper: the next size costs no less than those before."""
        if size > self.ok and needed_bytes and self.ok_bytes:
            self.bytes_per_size = (needed_bytes - self.ok_bytes) / (size - self.ok)

    def is_full(self, free_bytes: int) -> bool:
        """Whether one more than ``ok`` is known not to fit."""
        return self.ok_bytes is not None and self.ok_bytes + self.bytes_per_size > free_bytes

    def _in_proportion(self, size: int) -> int | None:
        """An upper bound of what a larger size needs."""
        return -(-self.ok_bytes * size // self.ok) if self.ok_bytes and self.ok else None

    def note_failed(self, size: int, align: int, device: str | None) -> None:
        """Work of this size ran out of memory."""
        with _lock:
            was_probe = 0 < self.ok < size
            if not was_probe:
                self.ok, self.ok_bytes, self.bytes_per_size = 0, None, 0
            self.bad, self.device = size, device
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
