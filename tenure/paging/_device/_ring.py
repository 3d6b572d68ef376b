"""One device buffer handed out in ranges of any size, and the waits that a range owes its past.

Invariant of `ByteRing`: ranges in use never overlap and never leave the buffer. Invariant of
`Fences`: whoever takes bytes learns of every event that their earlier use ends with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

_Event = TypeVar("_Event")


class ByteRing:
    """Places ranges one behind the other, wrapping at the end; any range may be freed at any time.

    Freed in the order of placing it is a ring, without fragments; a range that stays in use is
    stepped over.

    Args:
        capacity_bytes: the size of the buffer.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._ends: dict[int, int] = {}
        self._head = 0

    @property
    def used_bytes(self) -> int:
        """The bytes of all ranges in use."""
        return sum(end - start for start, end in self._ends.items())

    def place(self, n_bytes: int) -> int | None:
        """Take ``n_bytes`` in one piece; their start, or None where no gap is wide enough."""
        start = self._first_fit(n_bytes, self._head)
        if start is None:
            start = self._first_fit(n_bytes, 0)
        if start is not None:
            self._ends[start] = self._head = start + n_bytes
        return start

    def has_room(self, sizes: Iterable[int]) -> bool:
        """Whether pieces of these sizes could be placed one after the other."""
        trial = ByteRing(self.capacity_bytes)
        trial._ends, trial._head = dict(self._ends), self._head
        return all(trial.place(n_bytes) is not None for n_bytes in sizes)

    def free(self, start: int) -> None:
        """Give the range that begins at ``start`` back."""
        del self._ends[start]
        if not self._ends:
            self._head = 0  # so that equal passes use equal places

    def free_but(self, starts: Collection[int]) -> bool:
        """Give all ranges back but those that begin there; whether there were any."""
        lost = self._ends.keys() - starts
        for start in lost:
            self.free(start)
        return bool(lost)

    def _first_fit(self, n_bytes: int, from_byte: int) -> int | None:
        for low, high in self._gaps():
            start = max(low, from_byte)
            if start + n_bytes <= high:
                return start
        return None

    def _gaps(self) -> Iterator[tuple[int, int]]:
        low = 0
        for start, end in sorted(self._ends.items()):
            yield low, start
            low = end
        yield low, self.capacity_bytes


class Fences(Generic[_Event]):
    """For byte ranges, the events after which their last use is over."""

    def __init__(self) -> None:
        self._fences: list[tuple[int, int, _Event]] = []

    def __len__(self) -> int:
        return len(self._fences)

    def add(self, start: int, end: int, event: _Event) -> None:
        """The bytes from ``start`` to ``end`` are in use until ``event``."""
        self._fences.append((start, end, event))

    def take(self, start: int, end: int) -> list[_Event]:
        """The events that a new user of these bytes has to wait for; who asks later need not."""
        events, kept = [], []
        for low, high, event in self._fences:
            if high <= start or end <= low:
                kept.append((low, high, event))
                continue
            events.append(event)
            kept += [(low, start, event)] if low < start else []
            kept += [(end, high, event)] if end < high else []
        self._fences = kept
        return events
