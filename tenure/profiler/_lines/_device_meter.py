"""How much memory of an accelerator the lines of each thread took, by the device's counters.

Counters are the process's. Invariants: each byte that they tell is booked by one thread of a
profiler at the most; an interval in which another thread was at a watched line says so, unless the
allocator's events of this thread are all that was counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch

from tenure._stream import Allocated, Stats, allocated_in, counters_of


# A named tuple and no frozen dataclass, which takes three times as long to make.
class Usage(NamedTuple):
    """What happened in an interval.

    Attributes:
        allocated_bytes: bytes that were allocated.
        freed_bytes: bytes that were freed.
        peak_bytes: the most that was live.
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


def unseen_usage(was_bytes: int, level_bytes: int) -> Usage:
    """Return the usage of an interval of which only the levels at its two ends are known."""
    net = level_bytes - was_bytes
    return Usage(max(0, net), max(0, -net), max(was_bytes, level_bytes), False, False)


class DeviceAccount:
    """What the counters of one device have told, and no thread has booked yet."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # reentrant: a tick in a function of torch that reads the counters may look, too
        self.lock = threading.RLock()
        self.busy: set[DeviceMeter] = set()
        self.n_begun = 0
        self.waiting = 0, 0, True
        self.stats = counters_of(device)

    @property
    def live_bytes(self) -> int:
        """What was in use at the last look."""
        return allocated_in(self.stats).current

    def look(self) -> Stats:
        """Read the counters; what they have grown by waits to be booked."""
        before, self.stats = self.stats, counters_of(self.device)
        allocated, freed, is_counted = _growth(allocated_in(before), allocated_in(self.stats))
        waiting = self.waiting
        self.waiting = waiting[0] + allocated, waiting[1] + freed, waiting[2] and is_counted
        return self.stats


class DeviceMeter:
    """The counters of a device, for one thread; nothing is reset or emptied.

    Attributes:
        is_cuda: whether the allocator's events of a thread are told, too.
        before: the device's statistics at the start of the last interval.
        after: those at its end.
    """

    def __init__(self, account: DeviceAccount) -> None:
        self.is_cuda = account.device.type == "cuda"
        self._account = account
        self.start()

    def use(self, is_used: bool) -> None:
        """Say whether the thread is at a line, and so may book what happens."""
        account = self._account
        with account.lock:
            if not is_used:
                account.busy.discard(self)
            elif self not in account.busy:
                account.busy.add(self)
                # its own beginning tells it of nobody else
                account.n_begun += 1
                self._n_begun += 1

    def start(self) -> None:
        """Begin an interval: what waits was done by no line, unless another thread is at one."""
        account = self._account
        with account.lock:
            self.before = self.after = account.look()
            self._n_begun = account.n_begun
            if not account.busy - {self}:
                account.waiting = 0, 0, True

    def read(self, changes: list[int] | None) -> Usage:
        """Book what has come since any thread last did.

        Args:
            changes: the events of this thread on all CUDA devices; None where they were not seen.
        """
        account = self._account
        # read and booked under one lock: in between, another thread would book the same bytes
        with account.lock:
            self.before, self.after = self.after, account.look()
            allocated, freed, is_counted = account.waiting
            own = changes if self.is_cuda and is_counted else None
            is_all = own is not None and _sums(own) == (allocated, freed)
            left = 0, 0, True
            if own is not None and not is_all:
                # others did the rest; events are of all CUDA devices together, so they are bounds
                mine = min(_sums(own)[0], allocated), min(_sums(own)[1], freed)
                left = allocated - mine[0], freed - mine[1], True
                allocated, freed = mine
            are_others = bool(account.busy - {self})
            shared = not is_all and (
                are_others or account.n_begun != self._n_begun or own is not None
            )
            account.waiting = left if are_others else (0, 0, True)
            self._n_begun = account.n_begun
        peak_bytes, peak_exact = _peak(
            allocated_in(self.before), allocated_in(self.after), own if is_all and own else []
        )
        exact = is_counted and not shared
        return Usage(allocated, freed, peak_bytes, exact, peak_exact, shared)


def _sums(changes: list[int]) -> tuple[int, int]:
    return sum(n for n in changes if n > 0), -sum(n for n in changes if n < 0)


def _growth(before: Allocated, after: Allocated) -> tuple[int, int, bool]:
    """What was allocated and freed, and whether it was counted and not only told by the ends."""
    # if a counter was reset meanwhile, what it has counted since
    pairs = (before.allocated, after.allocated), (before.freed, after.freed)
    allocated, freed = (b - a if b >= a else b for a, b in pairs)
    net = after.current - before.current
    if allocated - freed == net:
        return allocated, freed, True
    # reset meanwhile, or never counted, as with cudaMallocAsync
    return max(0, net), max(0, -net), False


def _peak(before: Allocated, after: Allocated, own: list[int]) -> tuple[int, bool]:
    """The peak of an interval, and whether it is known although no counter is reset."""
    start, end = before.current, after.current
    if after.peak > before.peak:
        return after.peak, True
    allocated, freed, is_counted = _growth(before, after)
    # only up, or only down: one of the ends is the peak
    if is_counted and not (allocated and freed):
        return max(start, end), True
    if is_counted and _sums(own) == (allocated, freed):
        return start + max(accumulate(own, initial=0)), True
    return max(start, end), False


def keep_largest(largest: dict[str, int], last: Stats, before: Stats, after: Stats) -> None:
    """Take an interval into the largest value of each field of ``memory_stats()``.

    Args:
        largest: the values so far, by name.
        last: what this was called with as ``after`` the last time; empty at the first.
        before: the fields at the start of the interval.
        after: the fields at its end.
    """
    # most lines leave the device alone, and a hundred names need not be made to learn that
    if after == last and after == before:
        return
    was, now = dict(_flat("", before)), dict(_flat("", after))
    for name, value in now.items():
        if name.endswith(".peak") and value <= was.get(name, 0):
            # below an older peak: the larger of the two ends
            current = f"{name.removesuffix('peak')}current"
            reached = max(was.get(current, 0), now.get(current, 0))
        else:
            reached = value
        largest[name] = max(reached, largest.get(name, reached))


def _flat(prefix: str, stats: Stats) -> Iterator[tuple[str, int]]:
    """The fields by the names that ``memory_stats()`` gives them."""
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value
