"""How much memory an interval of the program took, gave back, and held at most; the host's meter.

Invariant: what a meter gives for two neighbouring intervals adds up to what it gives for both; an
interval whose inside could not be seen says so, and its numbers are then lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch

from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes

from ._fields import Stats, reached

_NO_STATS: Stats = MappingProxyType({})


class Interval(NamedTuple):
    """What happened between two looks.

    Attributes:
        allocated_bytes: bytes that were allocated.
        freed_bytes: bytes that were freed.
        peak_bytes: the most that was live, on the scale of the meter's ``level_bytes``.
        exact: whether the allocator's events were seen, or counted.
        peak_exact: whether the peak is the peak, and not the larger of the two ends.
        is_shared: whether other threads may have done some of it, and this one more than is told.
        before: the device's statistics at its start; empty for the CPU, which has none.
        after: those at its end.
    """

    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    exact: bool
    peak_exact: bool
    is_shared: bool = False
    before: Stats = _NO_STATS
    after: Stats = _NO_STATS

    @property
    def statistics(self) -> dict[str, int]:
        """The fields at the end, peaks as far as the interval's own can be told."""
        return reached(self.before, self.after)


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
            return unseen_interval(was, self.level_bytes)
        # The end is what other threads left it at; where it can't be told, this thread's own sum.
        self.level_bytes = allocator.live_bytes() if self._known else was + sum(changes.cpu)
        return cpu_interval(changes.cpu, self.level_bytes)


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


def _summed(changes: Sequence[int]) -> tuple[int, int]:
    """The sum, and the highest of the sums on the way, 0 at the start among them."""
    return sum(changes), max(accumulate(changes, initial=0))


def _unseen(net_bytes: int, peak_bytes: int) -> Interval:
    return Interval(max(0, net_bytes), max(0, -net_bytes), peak_bytes, False, False)
