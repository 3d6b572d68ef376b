"""How much memory an interval of the program took, gave back, and held at most; the host's meter.

Invariant: what a meter gives for two neighbouring intervals adds up to what it gives for both; an
interval whose inside could not be seen says so, and its numbers are then lower bounds.
"""

from __future__ import annotations

from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch

from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes

from ._fields import Stats

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
