"""How long a pass takes by a plan: copies and computation side by side, through a ring of bytes.

Invariant: the same rules as the engine's. Copies go one after another in the order of use, each as
soon as the ring has room; a unit is computed with when it is there, and then its place is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from .._device import ByteRing


@dataclass(frozen=True, slots=True)
class UnitUse:
    """The use of one unit.

    Attributes:
        n_bytes: what has to be copied for it; 0 for a resident unit.
        compute_s: how long the device computes with it.
    """

    n_bytes: int
    compute_s: float


@dataclass(slots=True)
class _Passing:
    start: int
    number: int
    copied_s: float


def pass_s(
    uses: Sequence[UnitUse], ring_bytes: int, link_bytes_per_s: float, copy_latency_s: float
) -> float:
    """Seconds of one pass of many, when each follows the one before; infinite if one can't run.

    Args:
        uses: what a pass uses, in order.
        ring_bytes: room for units that pass.
        link_bytes_per_s: speed of copies to the device.
        copy_latency_s: added to each copy.
    """
    # It would wait for ever.
    if any(use.n_bytes > ring_bytes for use in uses):
        return inf
    # The first finds the ring empty, and the second what the first has left there: what the third
    # takes is what all that follow take.
    n_passes = 3
    run = _Run(list(uses) * n_passes, ByteRing(ring_bytes), link_bytes_per_s, copy_latency_s)
    ends = [run.compute(number) for number in range(len(run.uses))]
    return ends[-1] - ends[-1 - len(uses)] if uses else 0.0


class _Run:
    def __init__(
        self, uses: list[UnitUse], ring: ByteRing, link_bytes_per_s: float, copy_latency_s: float
    ) -> None:
        self.uses = uses
        self._ring, self._bytes_per_s, self._latency_s = ring, link_bytes_per_s, copy_latency_s
        self._passing: deque[_Passing] = deque()
        self._next_copy = 0
        self._link_free_s = self._room_s = 0.0
        self._ends: list[float] = []

    def compute(self, number: int) -> float:
        """The end of a use, once all before it are known."""
        self._copy_ahead(number)
        ready_s = next((p.copied_s for p in self._passing if p.number == number), 0.0)
        begin_s = max(ready_s, self._ends[-1] if self._ends else 0.0)
        self._ends.append(begin_s + self.uses[number].compute_s)
        return self._ends[-1]

    def _copy_ahead(self, number: int) -> None:
        while self._next_copy < len(self.uses):
            n_bytes = self.uses[self._next_copy].n_bytes
            if n_bytes:
                start = self._place(n_bytes, number)
                if start is None:
                    return
                begin_s = max(self._link_free_s, self._room_s)
                self._link_free_s = begin_s + self._latency_s + n_bytes / self._bytes_per_s
                self._passing.append(_Passing(start, self._next_copy, self._link_free_s))
            self._next_copy += 1

    def _place(self, n_bytes: int, number: int) -> int | None:
        """Room for a copy while use ``number`` is about to run; earlier ones give theirs up."""
        while (start := self._ring.place(n_bytes)) is None:
            if not self._passing or self._passing[0].number >= number:
                return None
            # In the order of use, as the engine drops what is not needed soon.
            gone = self._passing.popleft()
            self._ring.free(gone.start)
            self._room_s = max(self._room_s, self._ends[gone.number])
        return start
