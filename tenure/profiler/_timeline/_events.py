"""What the allocator's events of one moment tell: how high it went, and what was there by then.

Events have sizes and an order, and no addresses: a storage's own are told by their size. Where a
temporary has the same size as a storage, the storage may count a moment more or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from tenure._heap import collector_paused
from tenure._torch import allocations

from ._accounts import Entry


class EventSession:
    """The session of the allocator's events on one thread, while no other profiler has it.

    Attributes:
        mark: what leaves a mark among the events; None while there is no session.
        missed: why events were not seen at some time.
    """

    def __init__(self) -> None:
        self.mark: Callable[[int], None] | None = None
        self.missed: set[str] = set()

    def begin(self) -> None:
        """Open it, where there is none."""
        if self.mark is not None:
            return
        if allocations.is_profiling():
            self.missed.add("another profiler had its thread")
            return
        allocations.begin()
        self.mark = allocations.marker()

    def read(self) -> list[int] | None:
        """The events of the host since it was last read; None where there was no session."""
        if self.mark is None:
            return None
        # thousands of objects are made for that, which are gone at once
        with collector_paused():
            changes = allocations.turn()
        if changes is None:
            self.mark = None
            self.missed.add("its session was ended by another profiler")
            return None
        return changes.cpu

    def end(self) -> list[int] | None:
        """The same, and the end of the session."""
        if self.mark is None:
            return None
        # in this order: what comes in between is followed by another call, which does no harm
        changes = allocations.end()
        self.mark = None
        return None if changes is None else changes.cpu


def highest(part: list[int], level: int) -> tuple[int, int]:
    """The highest level of a moment that ends at ``level``, and the event that led there."""
    levels = list(accumulate(part))
    top = max(levels)
    return level - levels[-1] + top, levels.index(top)


def made_later(made: Iterable[Entry], part: list[int], place: int) -> list[Entry]:
    """Those whose memory was allocated after an event."""
    later = part[place + 1 :]
    found = []
    for entry in made:
        if entry.account.device.type == "cpu" and entry.asked_bytes in later:
            later.remove(entry.asked_bytes)
            found.append(entry)
    return found


def gone_before(
    dead: Iterable[Entry], part: list[int], place: int
) -> tuple[list[Entry], list[Entry]]:
    """Those whose memory was freed before or at an event, and the others."""
    earlier = part[: place + 1]
    gone, still_there = [], []
    for entry in dead:
        # of another device: its level is that of the end of a moment
        if entry.account.device.type != "cpu":
            gone.append(entry)
        elif -entry.asked_bytes in earlier:
            earlier.remove(-entry.asked_bytes)
            gone.append(entry)
        else:
            still_there.append(entry)
    return gone, still_there


class WrappedNumbers:
    """The tensors that torch makes of numbers a second time, only because a mode is there.

    In ``x * 2`` it makes one, shows the mode the number, and makes another one right after when the
    mode calls the operation: two events of the same size, one after the other.

    Attributes:
        are_open: whether one of them is yet to be freed.
    """

    def __init__(self) -> None:
        self.are_open = False
        self._going: list[int] = []

    def taken_out(self, part: list[int], numbers: list[int]) -> list[int]:
        """Events without those of the second ones.

        Args:
            part: the events of a moment.
            numbers: the bytes of what was wrapped in it, in order.
        """
        coming, kept, before = iter([*numbers, 0]), [], 0
        wanted = next(coming)
        for n_bytes in part:
            if wanted and n_bytes == before == wanted:
                self._going.append(-wanted)
                wanted, before = next(coming), 0
            elif n_bytes in self._going:
                self._going.remove(n_bytes)
            else:
                kept.append(n_bytes)
                before = n_bytes
        self.are_open = bool(self._going)
        return kept

    def take_sum_out(self, part: list[int], n_bytes: int) -> None:
        """Remove the result of a sum that autograd would make in place without the mode.

        The operand that is freed instead is removed from the events of a later moment.
        """
        if n_bytes in part:
            del part[len(part) - 1 - part[::-1].index(n_bytes)]
            self._going.append(-n_bytes)
            self.are_open = True


def peak_of(step: int) -> int:
    """The number of the moment at which a step's level was highest."""
    return 2 * step


def end_of(step: int) -> int:
    """The number of the moment that ends it."""
    return 2 * step + 1


def place_of(events: list[int], mark: int, start: int) -> int | None:
    """Where a mark stands among events, from ``start`` on; None where it is missing."""
    try:
        return events.index(mark, start)
    except ValueError:
        return None
