"""How much memory an interval of the program took, gave back, and held at most.

Invariants: what a meter gives for two neighbouring intervals adds up to what it gives for both; an
interval whose inside could not be seen says so, and its numbers are then lower bounds. The counters
of a device are the whole process's: each byte that they tell is booked by one thread of a profiler
at the most, however many it has, and an interval that others may have had a part in says so.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes

Stats = Mapping[str, Any]
"""As ``memory_stats_as_nested_dict()`` gives it, or flat, as ``memory_stats()`` does."""

_NO_STATS: Stats = MappingProxyType({})


# A named tuple and no frozen dataclass: one is made for each line that allocates, and a dataclass
# takes three times as long to make.
class Usage(NamedTuple):
    """What happened in an interval, or in several: their sum is that of all of them.

    Attributes:
        allocated_bytes: bytes that were allocated.
        freed_bytes: bytes that were freed.
        peak_bytes: the most that was live, above what whoever asks counts from.
        exact: whether the allocator's events were seen, or counted.
        peak_exact: whether the peak is the peak, and not the larger of the two ends.
        shared: whether other threads may have done some of it, and this one more than is told.
    """

    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    exact: bool = True
    peak_exact: bool = True
    shared: bool = False

    def __add__(self, other: Usage) -> Usage:  # type: ignore[override]  # no longer tuple
        allocated, freed, peak, exact, peak_exact, shared = self
        # A peak that is only a bound makes the largest a bound: that one may have been higher.
        return Usage(
            allocated + other[0],
            freed + other[1],
            max(peak, other[2]),
            exact and other[3],
            peak_exact and other[4],
            shared or other[5],
        )

    def above(self, base_bytes: int) -> Usage:
        """The same, with a peak that is counted from a base."""
        return self._replace(peak_bytes=self.peak_bytes - base_bytes)


class Interval(NamedTuple):
    """What happened between two looks.

    Attributes:
        usage: the bytes; the peak is on the scale of the meter's ``level_bytes``.
        before: the device's statistics at its start; empty for the CPU, which has none.
        after: those at its end.
    """

    usage: Usage
    before: Stats = _NO_STATS
    after: Stats = _NO_STATS


class CpuMeter:
    """Host memory, as torch's CPU allocator gives it out."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.level_bytes = allocator.live_bytes()
        self._known = allocator.is_known()

    def use(self, is_used: bool) -> None:
        """Take no note: each thread's events are told to it alone."""

    def start(self) -> None:
        """Begin an interval here."""
        if self._known:
            self.level_bytes = allocator.live_bytes()

    def read(self, changes: Changes | None) -> Interval:
        """The interval since ``start`` or the last read, of which ``changes`` are the events."""
        was = self.level_bytes
        if changes is None:
            self.start()
            return Interval(unseen_usage(was, self.level_bytes))
        # The end is what other threads left it at; where it can't be told, this thread's own sum.
        self.level_bytes = allocator.live_bytes() if self._known else was + sum(changes.cpu)
        return Interval(host_usage(changes.cpu, self.level_bytes, self._known))


def host_usage(changes: list[int], level_bytes: int, is_known: bool) -> Usage:
    """The usage of an interval of host memory.

    Args:
        changes: what was allocated (positive) and freed in it, in order.
        level_bytes: what was live at its end.
        is_known: whether that is what c10 says, and not the sum of what this thread did.
    """
    net = sum(changes)
    allocated = sum([n_bytes for n_bytes in changes if n_bytes > 0])
    peak = level_bytes - net + max(accumulate(changes, initial=0))
    return Usage(allocated, allocated - net, peak, True, is_known)


def unseen_usage(was_bytes: int, level_bytes: int) -> Usage:
    """The usage of an interval of which only the levels at its two ends are known."""
    net = level_bytes - was_bytes
    return Usage(max(0, net), max(0, -net), max(was_bytes, level_bytes), False, False)


class DeviceAccount:
    """What the counters of one device have told that no thread of a profiler has booked yet.

    Where the backend tells each thread its own events, a thread books those. Else who looks first
    books all, and the next books what has come since: sums are right, whosever lines they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Reentrant: sys.monitoring reports the functions of torch that read the counters, too, and
        # a tick in one of them may look at this account.
        self.lock = threading.RLock()
        self.n_bookings = 0
        self._module: Any = torch.get_device_module(device)
        self._stats = _stats_of(self._module, device)
        self._busy: set[DeviceMeter] = set()
        self._drop()

    def use(self, meter: DeviceMeter, is_used: bool) -> None:
        """Note whether a thread is at a line, and so may book what happens."""
        with self.lock:
            (self._busy.add if is_used else self._busy.discard)(meter)

    def look(self) -> Stats:
        """Read the counters; what they have grown by waits to be booked."""
        before, self._stats = self._stats, _stats_of(self._module, self.device)
        allocated, freed, is_counted = _growth(_allocated_in(before), _allocated_in(self._stats))
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
            # A thread's events are of all CUDA devices together: what this one has counted bounds
            # them. See test_no_order_of_looks_books_a_byte_twice_and_events_lose_none.
            mine = sum(n for n in own if n > 0), -sum(n for n in own if n < 0)
            # Then others did the rest.
            is_shared = mine != (allocated, freed)
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
        return _allocated_in(self._stats).current

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
        # Read and booked under one lock: between the two another thread would book the same bytes.
        with account.lock:
            before, after = self._stats, account.look()
            was_shared = account.n_bookings != self._n_bookings
            booked = account.book(self, own, was_shared=was_shared)
            self._stats, self._n_bookings = after, account.n_bookings
        peak_bytes, peak_exact = _peak(_allocated_in(before), _allocated_in(after), own or [])
        usage = booked._replace(peak_bytes=peak_bytes, peak_exact=peak_exact)
        return Interval(usage, before, after)


def _growth(before: Allocated, after: Allocated) -> tuple[int, int, bool]:
    """What was allocated and freed, and whether it was counted and not only told by the ends."""
    allocated = _counted(before.allocated, after.allocated)
    freed = _counted(before.freed, after.freed)
    net = after.current - before.current
    if allocated - freed == net:
        return allocated, freed, True
    # Reset meanwhile, or never counted, as with cudaMallocAsync.
    return max(0, net), max(0, -net), False


def _counted(before: int, after: int) -> int:
    """What a counter has counted; if it was reset meanwhile, what it has counted since."""
    return after - before if after >= before else after


def _peak(before: Allocated, after: Allocated, own: list[int]) -> tuple[int, bool]:
    """The peak of an interval, and whether it is known although no counter is reset."""
    start, end = before.current, after.current
    if after.peak > before.peak:
        return after.peak, True
    allocated, freed, is_counted = _growth(before, after)
    # Only up, or only down: one of the ends is the peak.
    if is_counted and not (allocated and freed):
        return max(start, end), True
    highest = max(accumulate(own, initial=0))
    if is_counted and (sum(own), sum(n for n in own if n > 0)) == (end - start, allocated):
        return start + highest, True
    return max(start, end), False


class Allocated(NamedTuple):
    """The four figures of the allocated bytes; all 0 while a backend is not initialised."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0


def allocated_on(module: Any, device: torch.device) -> Allocated:
    """The four figures of a device, as its module tells them now."""
    return _allocated_in(_stats_of(module, device))


def _stats_of(module: Any, device: torch.device) -> Stats:
    """What a device's module tells of its memory, in the cheaper of the forms that it has."""
    read = getattr(module, "memory_stats_as_nested_dict", None) or module.memory_stats
    found: Stats = read(device)
    return found


def _allocated_in(stats: Stats) -> Allocated:
    """The four figures that say what happened to the allocated bytes."""
    pools = stats.get("allocated_bytes")
    if pools is not None:
        return Allocated(**pools["all"])
    get = stats.get
    return Allocated(*(get(f"allocated_bytes.all.{figure}", 0) for figure in Allocated._fields))
