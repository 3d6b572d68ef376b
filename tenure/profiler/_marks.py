"""The looks of one thread that are still to be taken, and where they stand among its events.

To read a session at every line takes longer than what most lines do, and while autograd's engine
calls Python a session that was begun outside must not be read at all: the engine has lent the
thread another state, and takes it back after. So a look leaves a mark among the events and notes
whose the time before it is; what happened in it is booked when the session is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import _torch_cpu_allocator as allocator
from ._lanes import Lane, Visit
from ._meters import cpu_interval, unseen_interval
from ._torch_allocations import Changes
from ._torch_marks import as_event, marker


class Marks:
    """The marks in one thread's session since it was last read."""

    __slots__ = ("_level_bytes", "_levels", "_live", "_n_visits", "_set_mark", "_visits")

    def __init__(self) -> None:
        # One entry for each mark, and of each lane a visit: flat, as hundreds of small lists would
        # keep Python's collector busy.
        self._levels: list[int] = []
        self._n_visits: list[int] = []
        self._visits: list[Visit | None] = []
        self._level_bytes = 0
        self._set_mark: Callable[[int], None]  # from the start of a session on
        self._live: Any

    def __len__(self) -> int:
        return len(self._levels)

    def start(self) -> None:
        """Begin with a session."""
        self._set_mark = marker()
        self._live = allocator.live_counter()
        self._level_bytes = self._live.value

    def set(self, lanes: Iterable[Lane]) -> None:
        """Mark this place: the time before it belongs to the visits that these lanes are at."""
        self._set_mark(len(self._levels))
        self._levels.append(self._live.value)
        for lane in lanes:
            self._visits.append(lane.look())
        self._n_visits.append(len(self._visits))

    def visits(self) -> list[Visit]:
        """Those that more may have happened to than has been booked."""
        return [visit for visit in list(self._visits) if visit is not None]

    def settle(self, changes: Changes | None) -> None:
        """Book what happened up to each mark; with no changes, what the levels tell of it."""
        start, first, was = 0, 0, self._level_bytes
        is_known = allocator.is_known()
        for number, (level, last) in enumerate(zip(self._levels, self._n_visits, strict=True)):
            end = None if changes is None else _find(changes.cpu, as_event(number), start)
            part: list[int] = []
            if end is not None and changes is not None:
                part, start = changes.cpu[start:end], end + 1
                # The end is what other threads left it at; else this thread's own sum.
                level = level if is_known else was + sum(part)
            for visit in self._visits[first:last]:
                if visit is None:
                    continue
                if part:
                    visit.take(cpu_interval(part, level))
                elif end is not None:
                    visit.stay(level, is_known)
                else:  # one that is missing was set in a state that the session is not in
                    visit.take(unseen_interval(was if changes is None else level, level))
            first, was = last, level
        self._levels.clear()
        self._n_visits.clear()
        self._visits.clear()
        self._level_bytes = was


def _find(events: list[int], mark: int, start: int) -> int | None:
    try:
        return events.index(mark, start)
    except ValueError:
        return None
