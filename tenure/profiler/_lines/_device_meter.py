"""The counters of an accelerator: what they have grown by from one reading to the next.

Counters are the process's. Invariant: each byte that they count is booked by one thread of a
profiler at the most, the first that reads them afterwards; nothing is reset or emptied.
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
    """

    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    exact: bool = True
    peak_exact: bool = True


def unseen_usage(was_bytes: int, level_bytes: int) -> Usage:
    """Return the usage of an interval of which only the levels at its two ends are known."""
    net = level_bytes - was_bytes
    return Usage(max(0, net), max(0, -net), max(was_bytes, level_bytes), False, False)


class DeviceMeter:
    """The counters of one device.

    Attributes:
        is_cuda: whether the allocator's events of a thread are told, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device = device
        # reentrant: torch's function that reads them is Python, whose calls the profiler sees
        self._lock = threading.RLock()
        self._stats: Stats = {}
        self._fields: dict[str, int] = {}
        self.start()

    @property
    def live_bytes(self) -> int:
        """What was in use at the last reading."""
        return allocated_in(self._fields).current

    def start(self) -> tuple[dict[str, int], dict[str, int]]:
        """Begin an interval; return the fields of ``memory_stats()`` at the last one, and now."""
        # read and replaced under one lock: in between, another thread would book the same bytes
        with self._lock:
            stats = counters_of(self._device)
            before = self._fields
            # a hundred names need not be made anew for lines that leave the device alone
            if stats != self._stats:
                self._stats, self._fields = stats, dict(_flat("", stats))
            return before, self._fields

    def read(self, changes: list[int] | None, largest: dict[str, int]) -> Usage:
        """Return what has come since the last interval began, and begin the next.

        Args:
            changes: the events of this thread on all CUDA devices; None where they were not seen.
            largest: the largest value of each field so far, which is updated.
        """
        before, after = self.start()
        for name, value in after.items():
            reached = value
            if name.endswith(".peak") and value <= before.get(name, 0):
                # below an older peak: the larger of the two ends
                current = f"{name.removesuffix('peak')}current"
                reached = max(before.get(current, 0), after.get(current, 0))
            largest[name] = max(reached, largest.get(name, reached))
        return _usage(allocated_in(before), allocated_in(after), changes or [])


def _usage(before: Allocated, after: Allocated, changes: list[int]) -> Usage:
    start, end = before.current, after.current
    # if a counter was reset meanwhile, what it has counted since
    pairs = (before.allocated, after.allocated), (before.freed, after.freed)
    allocated, freed = (b - a if b >= a else b for a, b in pairs)
    if allocated - freed != end - start:
        # reset meanwhile, or never counted, as with cudaMallocAsync
        usage = unseen_usage(start, end)
    else:
        # only up, or only down: one of the ends is the peak
        usage = Usage(allocated, freed, max(start, end), True, not (allocated and freed))
        if changes and sum(changes) == end - start and sum(map(abs, changes)) == allocated + freed:
            usage = usage._replace(peak_bytes=start + max(accumulate(changes)), peak_exact=True)
    # no counter is reset for us, so only a new peak is told by the counter of the peak
    if after.peak > before.peak:
        usage = usage._replace(peak_bytes=after.peak, peak_exact=True)
    return usage


def _flat(prefix: str, stats: Stats) -> Iterator[tuple[str, int]]:
    """The fields by the names that ``memory_stats()`` gives them."""
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value
