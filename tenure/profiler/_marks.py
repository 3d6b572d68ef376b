"""Looks that can't be taken yet, and where they stand among the allocator's events.

While autograd's engine calls Python it has lent the thread another state, and takes it back after:
a session that was begun outside must not be read or begun anew there. So the place is marked, and
what happened up to it is told apart later.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import _torch_cpu_allocator as allocator
from . import _torch_marks
from ._lanes import Booking, Lane
from ._meters import CpuMeter
from ._torch_allocations import Changes


@dataclass(frozen=True, slots=True)
class Mark:
    """One place among the events.

    Attributes:
        level_bytes: what was live there.
        bookings: whose the time before it is.
    """

    level_bytes: int
    bookings: tuple[tuple[Lane, Booking], ...]


def set_mark(marks: list[Mark], lanes: list[Lane]) -> None:
    """Mark this place for lanes of the CPU; others take their look now, by their counters."""
    bookings = tuple((lane, booking) for lane in lanes if (booking := lane.defer()) is not None)
    _torch_marks.set_mark(len(marks))
    marks.append(Mark(allocator.live_bytes(), bookings))


def settle(marks: list[Mark], changes: Changes | None) -> Changes | None:
    """Book what happened up to each mark, and return what happened after the last."""
    cpu = [] if changes is None else changes.cpu
    start = 0
    for number, mark in enumerate(marks):
        end = _find(cpu, start, _torch_marks.as_event(number))
        part = None if end is None else cpu[start:end]
        for lane, booking in mark.bookings:
            lane.settle(booking, CpuMeter.interval(part, mark.level_bytes))
        start = start if end is None else end + 1
    marks.clear()
    return None if changes is None else Changes(cpu[start:], changes.cuda)


def _find(cpu: list[int], start: int, mark: int) -> int | None:
    try:
        return cpu.index(mark, start)
    except ValueError:
        return None
