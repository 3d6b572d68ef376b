"""The sizes of one piece of work, as far as they are known, for all of its calls.

Invariant: ``ok`` worked and ``bad``, above it, did not; a size that works although it is ``bad``
shows that memory has come free, and one that fails although it is ``ok`` that it has gone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_FIRST_INTERVAL = 16
_CLOSED_INTERVAL = 512
"""Clean calls before what failed is tried again where nothing lies between it and what works."""
_WITH_LESS_ROOM = 4
"""Work that finds less memory free begins with one part in so many of what fitted."""
_FINE = 20
"""A step up is one part in so many: what fails ends the search, within 5 % of the largest."""
_RISE_BYTES = 1 << 28
"""Memory that came free has to be so much to count, where nothing tells what a size needs."""

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


@dataclass(slots=True)
class SizeRecord:
    """The memory of one site; threads may share it.

    Attributes:
        ok: the largest size that worked since something this small last failed; 0 where none did.
        bad: the smallest size that is known not to fit; None where none is.
        points: what ``ok`` needs at the most, and before it what up to three smaller sizes needed,
            where that was measured; then sizes that ran and needed more than they should.
        n_surprises: failures above a size that worked, so that something spoke for them, since
            more memory was seen to be free.
        is_guess: whether ``bad`` failed in work of another shape, when less memory was free, or was
            only predicted to fail.
        free_bytes: the memory that was free when ``bad`` failed; None where that is not known.
        least_free_bytes: the least that was free when work of ``ok`` began that returned; None
            where that is not known.
        device: the memory that ran out, as torch spells it.
        n_clean: calls without a failure since the last one, or since the last growth ended.
        interval: clean calls before a larger size is tried.
        climbing: whether the next call tries a larger size.
    """

    ok: int = 0
    bad: int | None = None
    points: tuple[Measured, ...] = ()
    n_surprises: int = 0
    is_guess: bool = False
    free_bytes: int | None = None
    least_free_bytes: int | None = None
    device: str | None = None
    n_clean: int = 0
    interval: int = _FIRST_INTERVAL
    climbing: bool = False

    def snapshot(self) -> SizeRecord:
        """Return a consistent snapshot, whatever other threads note meanwhile."""
        with _lock:
            return replace(self)

    def copy(self, *, has_less_room: bool = False) -> SizeRecord:
        """Return a copy of the sizes, to begin a record for work of another shape.

        What a size needs is another then. Clean calls count on, so that sizes grow also where no
        two calls have the same shape.

        Args:
            has_less_room: whether that work finds less memory free: it begins with a small size
                that surely fits, is measured, and tells how large the next may be.
        """
        with _lock:
            ok = max(1, self.ok // _WITH_LESS_ROOM) if self.ok and has_less_room else self.ok
            return replace(
                self, ok=ok, points=(), n_surprises=0, is_guess=True, least_free_bytes=None
            )

    # --- a call begins

    def start(self, first: int, ceiling: int, align: int) -> int:
        """Return the size that a call begins with, whatever memory is free.

        Args:
            first: the size where nothing is known.
            ceiling: the largest that is allowed.
            align: sizes are multiples of it.
        """
        with _lock:
            # larger than all that were tried: nothing speaks against it yet
            if self.bad is None and not self.climbing and self.ok < first:
                return first
            if self.is_due(ceiling):
                self.climbing = True
                return self._grown(ceiling, align)
            if self.ok:
                return min(self.ok, ceiling)
            if self.bad is None or first < self.bad:
                return first
            return min(first, max(align, self.bad // 2 // align * align))

    def is_due(self, ceiling: int) -> bool:
        """Tell whether a size above the one that works is worth the risk now."""
        # measuring tells what fits: to try more is only for what it may not see
        interval = max(self.interval, _CLOSED_INTERVAL) if self.points else self.interval
        return (self.climbing or self.n_clean >= interval) and 0 < self.ok < ceiling

    def _grown(self, ceiling: int, align: int) -> int:
        wanted = 2 * self.ok
        if self.bad is not None:
            # what failed may have been a last piece, which is no multiple
            wanted = min(-(-self.bad // align) * align, self.ok + self._step(align))
        return min(ceiling, max(wanted, self.ok + 1))

    def _step(self, align: int) -> int:
        return max(align, self.ok // _FINE // align * align)

    def has_risen(self, free_bytes: int) -> bool:
        """Note whether so much more memory is free than when a size failed that it may fit now."""
        with _lock:
            then_bytes = self.free_bytes
            if then_bytes is None or free_bytes - then_bytes <= max(_RISE_BYTES, then_bytes // 8):
                return False
            self.free_bytes, self.climbing, self.n_surprises = free_bytes, True, 0
            return True

    # --- what happened

    def note_ok(
        self,
        size: int,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        *,
        is_trial: bool = False,
    ) -> bool:
        """Work of this size returned, begun with so much free; whether none as large had worked.

        Args:
            size: the size.
            needed_bytes: what it needed; None where that is not known.
            free_bytes: what was free before; None where that is not known.
            is_trial: whether it ran to tell what sizes need.
        """
        with _lock:
            grew = 0 < self.ok < size
            if needed_bytes:
                # it tells what fits, better than trying
                self._rest()
            if size >= self.ok:
                self._note_room(size, free_bytes)
                self.points = self._points_with(size, needed_bytes)
                self.ok = size
            elif needed_bytes and is_trial:
                self.points = (Measured(size, needed_bytes), *self.points)
            elif needed_bytes and self.points:
                self._note_less(size, needed_bytes)
            if self.bad is not None and size >= self.bad:
                # memory has come free: go on at once, and faster
                self.n_surprises, self.climbing = 0, not self.points
                # By what was measured, if it was: memory comes and goes with what a loader fetches
                # ahead, and what failed far above would fail each time.
                self.is_guess = bool(self.points)
                self.bad = size + 1 if self.points else None
            return grew

    def _note_room(self, size: int, free_bytes: int | None) -> None:
        known_bytes = self.least_free_bytes if size == self.ok else None
        told = [each for each in (free_bytes, known_bytes) if each is not None]
        self.least_free_bytes = min(told, default=None)

    def _points_with(self, size: int, needed_bytes: int | None) -> tuple[Measured, ...]:
        larger = [each for each in self.points if each.size > size]
        if needed_bytes:
            # one that needed more had something beside it, such as what is verified at first
            smaller = [p for p in self.points if p.size < size and p.n_bytes <= needed_bytes]
            return (*smaller[:1], *apart([*smaller[1:], Measured(size, needed_bytes)]), *larger)
        if size == self.ok:
            return self.points
        if self.ok not in [each.size for each in self.points]:
            return ()
        # in proportion to the one that was measured: an upper bound, whatever part of it is fixed
        n_bytes = max(each.n_bytes for each in self.points if each.size <= self.ok)
        return (Measured(size, -(-n_bytes * size // self.ok)),)

    def _note_less(self, size: int, needed_bytes: int) -> None:
        """Note from a smaller size that ``ok`` needs less than before, as if gradients exist."""
        least = Measured(self.ok, -(-needed_bytes * self.ok // size))
        if least.n_bytes < self.points[-1].n_bytes:
            self.points = (least,)

    def note_over(self, size: int, needed_bytes: int) -> None:
        """Work of this size returned, and needed more than it should."""
        with _lock:
            self.bad = size
            self.points = tuple(sorted({*self.points, Measured(size, needed_bytes)}))

    def note_failed(
        self, size: int, align: int, device: str | None, free_bytes: int | None = None
    ) -> None:
        """Work of this size ran out of memory, of which so much is free when it is let go."""
        with _lock:
            was_probe = 0 < self.ok < size
            self.n_surprises += was_probe
            if not was_probe:
                self.ok, self.points, self.least_free_bytes, self.n_surprises = 0, (), None, 0
            self.bad, self.device, self.free_bytes = size, device, free_bytes
            self.is_guess = False
            if self.climbing:
                # each failure above what works doubles the wait for the next: failures grow with
                # the logarithm of the calls, see test_failures_grow_with_the_logarithm_of_the_calls
                self.interval *= 2
            is_closed = was_probe and size - self.ok <= self._step(align)
            self._rest(_CLOSED_INTERVAL if is_closed else 0)

    def forget(self) -> None:
        """Not even the smallest size fits: that says how little memory there was, and of no size.

        A later call has other memory, or fails again; from the smallest size up it would be slow
        for long.
        """
        with _lock:
            self.ok, self.bad, self.points, self.n_surprises = 0, None, (), 0
            self.is_guess = self.climbing = False
            self.free_bytes = self.least_free_bytes = None

    def note_predicted(self, too_large: int | None, device: str, free_bytes: int) -> None:
        """Note that a prediction ruled out this size, when nothing else was known.

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
        """Note that a call, or many pieces of one, ended without a failure at ``size``."""
        with _lock:
            if size >= ceiling:
                self.n_clean, self.climbing = 0, False
            elif not self.climbing:
                self.n_clean += 1

    def _rest(self, at_least: int = 0) -> None:
        self.climbing, self.n_clean = False, 0
        self.interval = max(self.interval, at_least)


def apart(points: Sequence[Measured]) -> list[Measured]:
    """Return the last of some sizes, and up to two before it, far enough apart to show a slope.

    Measurements vary: two sizes that lie close tell little of what lies far.
    """
    found = [points[-1]]
    for each in reversed(points[:-1]):
        if 4 * each.size <= 3 * found[0].size and len(found) < 3:
            found = [each, *found]
    return found
