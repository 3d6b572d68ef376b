"""Looks that can't be taken yet, and where they stand among the allocator's events.

While autograd's engine calls Python it has lent the thread another state, and takes it back after:
a session that was begun outside must not be read or begun anew there. So the place is marked, by an
allocation of a size that no tensor has, and what happened up to it is told apart later.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import _torch_cpu_allocator as allocator
from ._lanes import Booking, Lane
from ._meters import CpuMeter
from ._torch_allocations import Changes, allocate_and_free

# Odd, so no tensor but one of bytes has such a size, and no two marks in a row are alike.
_SMALLEST_BYTES = 1009
_N_SIZES = 500


@dataclass(frozen=True, slots=True)
class Mark:
    """One place among the events.

    Attributes:
        n_bytes: the size of the allocation that marks it.
        level_bytes: what was live there.
        bookings: whose the time before it is.
    """

    n_bytes: int
    level_bytes: int
    bookings: tuple[tuple[Lane, Booking], ...]


def set_mark(marks: list[Mark], lanes: list[Lane]) -> None:
    """Mark this place for lanes of the CPU; others take their look now, by their counters."""
    bookings = tuple((lane, booking) for lane in lanes if (booking := lane.defer()) is not None)
    n_bytes = _SMALLEST_BYTES + 2 * (len(marks) % _N_SIZES)
    marks.append(Mark(n_bytes, allocator.live_bytes(), bookings))
    allocate_and_free(n_bytes)


def settle(marks: list[Mark], changes: Changes | None) -> Changes | None:
    """Book what happened up to each mark, and return what happened after the last."""
    cpu = [] if changes is None else changes.cpu
    start = 0
    for mark in marks:
        end = _find(cpu, start, mark.n_bytes)
        part = None if end is None else cpu[start:end]
        for lane, booking in mark.bookings:
            lane.settle(booking, CpuMeter.interval(part, mark.level_bytes))
        start = start if end is None else end + 2
    marks.clear()
    return None if changes is None else Changes(cpu[start:], changes.cuda)


def _find(cpu: list[int], start: int, n_bytes: int) -> int | None:
    """Where a block of this size is made and freed at once."""
    for i in range(start, len(cpu) - 1):
        if cpu[i] == n_bytes and cpu[i + 1] == -n_bytes:
            return i
    return None
