"""The looks of one thread that are still to be taken, and where they stand among its events.

To read a session at every line takes longer than what most lines do, and while autograd's engine
calls Python a session that was begun outside must not be read at all: the engine has lent the
thread another state, and takes it back after. So a look leaves a mark among the events and notes
whose the time before it is; what happened in it is booked when the session is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from . import _torch_cpu_allocator as allocator
from ._lanes import Visit
from ._meters import cpu_interval, unseen_interval
from ._torch_allocations import Changes
from ._torch_marks import as_event, set_mark


class Marks:
    """The marks in one thread's session since it was last read."""

    __slots__ = ("_level_bytes", "_looks")

    def __init__(self) -> None:
        self._looks: list[tuple[int, Sequence[Visit | None]]] = []
        self._level_bytes = 0

    def __len__(self) -> int:
        return len(self._looks)

    def start(self) -> None:
        """Begin with a session."""
        self._level_bytes = allocator.live_bytes()

    def set(self, visits: Sequence[Visit | None]) -> None:
        """Mark this place: the time before it was theirs, of each lane one, or nobody's."""
        set_mark(len(self._looks))
        self._looks.append((allocator.live_bytes(), visits))

    def visits(self) -> list[Visit]:
        """Those that more may have happened to than has been booked."""
        noted = list(self._looks)
        return [v for v in chain.from_iterable(visits for _, visits in noted) if v is not None]

    def settle(self, changes: Changes | None) -> None:
        """Book what happened up to each mark; with no changes, what the levels tell of it."""
        start, was = 0, self._level_bytes
        is_known = allocator.is_known()
        for number, (level, visits) in enumerate(self._looks):
            if changes is None:
                interval = unseen_interval(was, level)
            elif (end := _find(changes.cpu, as_event(number), start)) is None:
                interval = unseen_interval(level, level)  # its events follow with the next mark
            else:
                part, start = changes.cpu[start:end], end + 1
                # The end is what other threads left it at; else this thread's own sum.
                level = level if is_known else was + sum(part)  # noqa: PLW2901
                interval = cpu_interval(part, level)
            for visit in visits:
                if visit is not None:
                    visit.take(interval)
            was = level
        self._looks.clear()
        self._level_bytes = was


def _find(events: list[int], mark: int, start: int) -> int | None:
    try:
        return events.index(mark, start)
    except ValueError:
        return None
