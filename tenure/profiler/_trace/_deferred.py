"""The looks of one thread that are still to be taken, and where they stand among its events.

To read a session at every line takes longer than what most lines do, and while autograd's engine
calls Python a session that was begun outside must not be read at all: the engine has lent the
thread another state, and takes it back after. So a look leaves a mark among the events and notes
whose the time before it is; what happened in it is booked when the session is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes, as_event, marker

from .._allocator import cpu_interval, unseen_interval
from ._booking import Lane, Visit


class Marks:
    """The marks in one thread's session since it was last read."""

    __slots__ = ("_level_bytes", "_live", "_looks", "_set_mark")

    def __init__(self) -> None:
        # of each mark the level there, and of each lane whose the time before it was
        self._looks: list[tuple[int, list[Visit | None]]] = []
        self._level_bytes = 0
        self._set_mark: Callable[[int], None]  # from the start of a session on
        self._live: Any

    def __len__(self) -> int:
        return len(self._looks)

    def start(self) -> None:
        """Begin with a session."""
        self._set_mark = marker()
        self._live = allocator.live_counter()
        self._level_bytes = self._live.value

    def set(self, lanes: Iterable[Lane]) -> None:
        """Mark this place: the time before it belongs to the visits that these lanes are at."""
        # An interrupt may come between any two of these steps. A look without a mark is told of
        # with the next; a mark without a look would be taken for that of the next.
        self._looks.append((self._live.value, [lane.look() for lane in lanes]))
        self._set_mark(len(self._looks) - 1)

    def visits(self) -> list[Visit]:
        """Those that more may have happened to than has been booked."""
        return [v for _, visits in list(self._looks) for v in visits if v is not None]

    def settle(self, changes: Changes | None) -> None:
        """Book what happened up to each mark; with no changes, what the levels tell of it."""
        looks, self._looks = self._looks, []  # first, so that an interrupt books nothing twice
        start, was, is_known = 0, self._level_bytes, allocator.is_known()
        for number, (level, visits) in enumerate(looks):
            end = None if changes is None else _find(changes.cpu, as_event(number), start)
            part: list[int] = []
            if end is not None and changes is not None:
                part, start = changes.cpu[start:end], end + 1
                # The end is what other threads left it at; else this thread's own sum.
                level = level if is_known else was + sum(part)
            for visit in visits:
                if visit is None:
                    continue
                if part:
                    visit.take(cpu_interval(part, level))
                elif end is not None:
                    visit.stay(level, is_known)
                else:  # one that is missing was set in a state that the session is not in
                    visit.take(unseen_interval(was if changes is None else level, level))
            was = level
        self._level_bytes = was


def _find(events: list[int], mark: int, start: int) -> int | None:
    try:
        return events.index(mark, start)
    except ValueError:
        return None
