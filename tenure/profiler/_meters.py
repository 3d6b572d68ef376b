"""How much memory of one device an interval of the program took, gave back, and held at most.

Invariant: what a meter gives for two neighbouring intervals adds up to what it gives for both; an
interval whose inside could not be seen says so, and its numbers are then lower bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from . import _torch_cpu_allocator as allocator
from ._torch_allocations import Changes

_CURRENT = "allocated_bytes.all.current"
_PEAK = "allocated_bytes.all.peak"
_ALLOCATED = "allocated_bytes.all.allocated"
_FREED = "allocated_bytes.all.freed"

Statistics = Mapping[str, int]


class Interval(NamedTuple):
    """What happened between two looks.

    Attributes:
        allocated_bytes: bytes that were allocated.
        freed_bytes: bytes that were freed.
        peak_bytes: the most that was live, on the scale of the meter's ``level_bytes``.
        exact: whether the allocator's events were seen, or counted.
        peak_exact: whether the peak is the peak, and not the larger of the two ends.
        statistics: the device's ``memory_stats()`` at the end, peaks as far as the interval's own
            can be told; empty for the CPU, which has none.
    """

    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    exact: bool
    peak_exact: bool
    statistics: Statistics = MappingProxyType({})


class CpuMeter:
    """Host memory, as torch's CPU allocator gives it out."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.level_bytes = allocator.live_bytes()
        self._known = allocator.is_known()

    def start(self) -> None:
        """Begin an interval here."""
        if self._known:
            self.level_bytes = allocator.live_bytes()

    def read(self, changes: Changes | None) -> Interval:
        """The interval since ``start`` or the last read, of which ``changes`` are the events."""
        was = self.level_bytes
        if changes is None:
            self.start()
            return unseen_interval(was, self.level_bytes)
        # The end is what other threads left it at; where it can't be told, this thread's own sum.
        self.level_bytes = allocator.live_bytes() if self._known else was + sum(changes.cpu)
        return cpu_interval(changes.cpu, self.level_bytes)


class DeviceMeter:
    """A device whose module offers ``memory_stats``; nothing of it is reset or emptied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._statistics = self._read()

    @property
    def level_bytes(self) -> int:
        """Live bytes of the device at the last look."""
        return self._statistics.get(_CURRENT, 0)

    def start(self) -> None:
        """Begin an interval here."""
        self._statistics = self._read()

    def read(self, changes: Changes | None) -> Interval:
        """The interval since ``start`` or the last read, of which ``changes`` are the events."""
        before, after = self._statistics, self._read()
        self._statistics = after
        allocated = _counted(before, after, _ALLOCATED)
        freed = _counted(before, after, _FREED)
        statistics = {name: _at_most(before, after, name) for name in after}
        net = self.level_bytes - before.get(_CURRENT, 0)
        if allocated - freed != net:  # reset meanwhile, or never counted, as by cudaMallocAsync
            return _ends(before, after)._replace(statistics=statistics)
        seen = changes.cuda if changes is not None else []
        peak, peak_exact = _peak(before, after, allocated, freed, seen)
        return Interval(allocated, freed, peak, True, peak_exact, statistics)

    def _read(self) -> dict[str, int]:
        return dict(self._module.memory_stats(self.device))  # empty while CUDA is not initialised


Meter = CpuMeter | DeviceMeter


def cpu_interval(changes: list[int], level_bytes: int) -> Interval:
    """The interval of changes of host memory that ended at a level."""
    if not changes:
        return Interval(0, 0, level_bytes, True, allocator.is_known())
    net, highest = _summed(changes)
    allocated = sum([n_bytes for n_bytes in changes if n_bytes > 0])
    peak = level_bytes - net + highest
    return Interval(allocated, allocated - net, peak, True, allocator.is_known())


def unseen_interval(was_bytes: int, level_bytes: int) -> Interval:
    """An interval of which only the levels at its two ends are known."""
    return _unseen(level_bytes - was_bytes, max(was_bytes, level_bytes))


def meter_for(device: torch.device) -> Meter:
    """The meter of a device that can be measured."""
    return CpuMeter() if device.type == "cpu" else DeviceMeter(device)


def _summed(changes: Sequence[int]) -> tuple[int, int]:
    """The sum, and the highest of the sums on the way, 0 at the start among them."""
    return sum(changes), max(accumulate(changes, initial=0))


def _unseen(net_bytes: int, peak_bytes: int) -> Interval:
    return Interval(max(0, net_bytes), max(0, -net_bytes), peak_bytes, False, False)


def _ends(before: Statistics, after: Statistics) -> Interval:
    """What the two ends tell, and a peak that is a new one."""
    start, end = before.get(_CURRENT, 0), after.get(_CURRENT, 0)
    if after.get(_PEAK, 0) > before.get(_PEAK, 0):
        return _unseen(end - start, after[_PEAK])._replace(peak_exact=True)
    return _unseen(end - start, max(start, end))


def _counted(before: Statistics, after: Statistics, name: str) -> int:
    """What a counter has counted; if it was reset meanwhile, what it has counted since."""
    grown = after.get(name, 0) - before.get(name, 0)
    return grown if grown >= 0 else after.get(name, 0)


def _peak(
    before: Statistics, after: Statistics, allocated: int, freed: int, changes: list[int]
) -> tuple[int, bool]:
    """The peak of an interval, and whether it is known although no counter is reset."""
    start, end = before.get(_CURRENT, 0), after.get(_CURRENT, 0)
    if after.get(_PEAK, 0) > before.get(_PEAK, 0):
        return after[_PEAK], True
    if not allocated or not freed:
        return max(start, end), True
    net, highest = _summed(changes)
    if net == end - start and sum(n for n in changes if n > 0) == allocated:
        return start + highest, True
    return max(start, end), False


def _at_most(before: Statistics, after: Statistics, name: str) -> int:
    """A field at the end; of a peak, as much as the interval is known to have reached."""
    stem, _, figure = name.rpartition(".")
    if figure != "peak" or after[name] > before.get(name, 0):
        return after[name]
    current = f"{stem}.current"
    return max(before.get(current, 0), after.get(current, 0))
