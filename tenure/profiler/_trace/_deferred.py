"""The looks of one thread that are still to be told of, and where they stand among its events.

To read a session at every line takes longer than what most lines do, and while autograd's engine
calls Python a session that was begun outside must not be read at all: the engine has lent the
thread another state, and takes it back after. So a look leaves a mark among the events and notes
whose the time before it is; what happened in it is told when the session is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes, as_event, marker

from ._listeners import Claim, ThreadListener


class DeferredLooks:
    """The looks in one thread's session since it was last read."""

    __slots__ = ("_level_bytes", "_live", "_looks", "_set_mark")

    def __init__(self) -> None:
        # Of each look the level there, and of each listener whose the time before it was.
        self._looks: list[tuple[int, list[Claim | None]]] = []
        self._level_bytes = 0
        # From the start of a session on; asked for once, because each line uses them.
        self._set_mark: Callable[[int], None]
        self._live: Any

    def __len__(self) -> int:
        return len(self._looks)

    def start(self) -> None:
        """Begin with a session."""
        self._set_mark = marker()
        self._live = allocator.live_counter()
        self._level_bytes = self._live.value

    def defer(self, listeners: Iterable[ThreadListener]) -> None:
        """Mark this place: the time before it belongs to what these listeners claim."""
        # An interrupt may come between any two of these steps. A look without a mark is told of
        # with the next; a mark without a look would be taken for that of the next. See
        # test_an_interrupt_at_a_mark_loses_no_other_line.
        self._looks.append((self._live.value, [listener.claim() for listener in listeners]))
        self._set_mark(len(self._looks) - 1)

    def claims(self) -> list[Claim]:
        """Those that more may have happened to than they have been told."""
        # A copy first: other threads ask while this one goes on looking.
        return [c for _, claims in list(self._looks) for c in claims if c is not None]

    def tell_deferred(self, changes: Changes | None) -> None:
        """Tell what happened up to each mark; with no changes, what the levels say of it."""
        # Emptied first, so that an interrupt halfway tells nothing twice.
        looks, self._looks = self._looks, []
        start, was, is_known = 0, self._level_bytes, allocator.is_known()
        for number, (level, claims) in enumerate(looks):
            end = None if changes is None else _find(changes.cpu, as_event(number), start)
            part: list[int] = []
            if end is not None and changes is not None:
                part, start = changes.cpu[start:end], end + 1
                # The end is what other threads left it at; else this thread's own sum.
                level = level if is_known else was + sum(part)
            for claim in claims:
                if claim is None:
                    continue
                if end is not None:
                    claim.take(part, level, is_known)
                else:
                    # A mark that is missing was set in a state that the session is not in: what
                    # came before it is told with the next mark, and here only the level is known.
                    claim.miss(was if changes is None else level, level)
            was = level
        self._level_bytes = was


def _find(events: list[int], mark: int, start: int) -> int | None:
    try:
        return events.index(mark, start)
    except ValueError:
        return None
