"""How much memory of an accelerator an interval took, by counters that the whole process shares.

Invariant: each byte that the counters of a device tell is booked by one thread of a profiler at
the most, however many it has; an interval that others may have had a part in says so.
"""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import Any

import torch

from tenure._torch.allocations import Changes

from ._fields import Allocated, Stats, allocated_in, stats_of
from ._meters import Interval, Usage


class DeviceAccount:
    """What the counters of one device have told that no thread of a profiler has booked yet.

    Where the backend tells each thread its own events, a thread books those. Else who looks first
    books all, and the next books what has come since: sums are right, whosever lines they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.n_bookings = 0
        self._module: Any = torch.get_device_module(device)
        self._stats = stats_of(self._module, device)
        self._busy: set[DeviceMeter] = set()
        self._drop()

    def use(self, meter: DeviceMeter, is_used: bool) -> None:
        """Note whether a thread is at a line, and so may book what happens."""
        with self.lock:
            (self._busy.add if is_used else self._busy.discard)(meter)

    def look(self) -> Stats:
        """Read the counters; what they have grown by waits to be booked."""
        before, self._stats = self._stats, stats_of(self._module, self.device)
        allocated, freed, is_counted = _growth(allocated_in(before), allocated_in(self._stats))
        self._allocated += allocated
        self._freed += freed
        self._is_counted &= is_counted
        return self._stats

    def drop_unless_used(self, meter: DeviceMeter) -> None:
        """What waits was done by no line, unless another thread is at one."""
        if not self._busy - {meter}:
            self._drop()

    def book(self, meter: DeviceMeter, own: list[int] | None, *, was_shared: bool) -> Usage:
        """Take what a thread did out of what waits, as a usage without a peak.

        Args:
            meter: the thread's.
            own: the events of the thread, if they were seen.
            was_shared: whether another thread has booked something since this one last looked.
        """
        allocated, freed = self._allocated, self._freed
        others = bool(self._busy - {meter}) and (allocated or freed)
        is_exact, is_shared = self._is_counted, was_shared or bool(others)
        if own is not None and self._is_counted and self._tells_events:
            mine = sum(n for n in own if n > 0), -sum(n for n in own if n < 0)
            is_shared = mine != (allocated, freed)  # then others did the rest
            allocated, freed = min(mine[0], allocated), min(mine[1], freed)
        self._allocated -= allocated
        self._freed -= freed
        self.n_bookings += bool(allocated or freed)
        self.drop_unless_used(meter)
        is_exact = is_exact and not is_shared
        return Usage(allocated, freed, 0, is_exact, False, is_shared)

    @property
    def _tells_events(self) -> bool:
        """Whether the sessions of threads note what this device allocates."""
        return self.device.type == "cuda"

    def _drop(self) -> None:
        self._allocated = self._freed = 0
        self._is_counted = True


class DeviceMeter:
    """A device whose module has ``memory_stats``, for one thread; nothing is reset or emptied."""

    def __init__(self, account: DeviceAccount) -> None:
        self.device = account.device
        self._account = account
        with account.lock:
            self._stats = account.look()
            self._n_bookings = account.n_bookings

    @property
    def level_bytes(self) -> int:
        """Live bytes of the device at the last look."""
        return allocated_in(self._stats).current

    def use(self, is_used: bool) -> None:
        """Say whether the thread is at a line."""
        self._account.use(self, is_used)

    def start(self) -> None:
        """Begin an interval here."""
        account = self._account
        with account.lock:
            self._stats = account.look()
            self._n_bookings = account.n_bookings
            account.drop_unless_used(self)

    def read(self, changes: Changes | None) -> Interval:
        """The interval since ``start`` or the last read, of which ``changes`` are the events."""
        account, own = self._account, None if changes is None else changes.cuda
        with account.lock:
            before, after = self._stats, account.look()
            was_shared = account.n_bookings != self._n_bookings
            booked = account.book(self, own, was_shared=was_shared)
            self._stats, self._n_bookings = after, account.n_bookings
        peak_bytes, peak_exact = _peak(allocated_in(before), allocated_in(after), own or [])
        usage = booked._replace(peak_bytes=peak_bytes, peak_exact=peak_exact)
        return Interval(usage, before, after)


def _growth(before: Allocated, after: Allocated) -> tuple[int, int, bool]:
    """What was allocated and freed, and whether it was counted and not only told by the ends."""
    allocated = _counted(before.allocated, after.allocated)
    freed = _counted(before.freed, after.freed)
    net = after.current - before.current
    if allocated - freed == net:
        return allocated, freed, True
    return max(0, net), max(0, -net), False  # reset meanwhile, or never counted: cudaMallocAsync


def _counted(before: int, after: int) -> int:
    """What a counter has counted; if it was reset meanwhile, what it has counted since."""
    return after - before if after >= before else after


def _peak(before: Allocated, after: Allocated, own: list[int]) -> tuple[int, bool]:
    """The peak of an interval, and whether it is known although no counter is reset."""
    start, end = before.current, after.current
    if after.peak > before.peak:
        return after.peak, True
    allocated, freed, is_counted = _growth(before, after)
    if is_counted and not (allocated and freed):
        return max(start, end), True
    highest = max(accumulate(own, initial=0))
    if is_counted and (sum(own), sum(n for n in own if n > 0)) == (end - start, allocated):
        return start + highest, True
    return max(start, end), False
