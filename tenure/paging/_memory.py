"""The device's memory for units: slabs that are allocated whole, places in them, and the ring.

Invariant: each place has a storage of its own: who shares the bytes of one unit is told from who
shares those of its neighbours. Ranges of the ring that are in use never overlap; who takes one
learns of every event that its earlier use ends with.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from tenure._torch.lending import in_own_storage

from ._tensors import Unit


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """One slab, before it is allocated.

    Attributes:
        units: what is to stand in it, in this order; in the first slab behind the ring.
        n_bytes: its size.
    """

    units: tuple[Unit, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All slabs of a model, before they are allocated.

    Attributes:
        ring_bytes: the room for units that pass, at the front of the first slab.
        slabs: the slabs, in the order in which they are allocated.
        later: those that may be allocated once there is more memory; None where what is let go
            does not come back.
    """

    ring_bytes: int
    slabs: tuple[SlabPlan, ...]
    later: tuple[SlabPlan, ...] | None = None

    @property
    def sizes(self) -> list[int]:
        """The bytes of each slab."""
        return [slab.n_bytes for slab in self.slabs]

    @property
    def units(self) -> frozenset[Unit]:
        """The units that stand in the slabs."""
        return frozenset(unit for slab in self.slabs for unit in slab.units)

    @property
    def resident_bytes(self) -> int:
        """What the slabs have beside the ring."""
        return sum(self.sizes) - self.ring_bytes


class Place(NamedTuple):
    """Bytes of a slab, at least as many as what stands there.

    Attributes:
        slab: uint8, memory that was allocated in one piece.
        memory: uint8, these bytes, in a storage of their own.
    """

    slab: Tensor
    memory: Tensor

    @property
    def around(self) -> tuple[UntypedStorage, ...]:
        """The storage of the slab, where that is another one."""
        return () if self.memory is self.slab else (self.slab.untyped_storage(),)


def place_in(slab: Tensor, start: int, end: int) -> Place:
    """Return the bytes from ``start`` to ``end`` of a slab, for one unit or the ring."""
    # All of it: the slab's own storage will do, and is one thing less to name in reports.
    is_whole = start == 0 and end == slab.nbytes
    return Place(slab, slab if is_whole else in_own_storage(slab, start, end))


def places_in(slab: Tensor, start: int, units: Sequence[Unit]) -> Iterator[tuple[Unit, Place]]:
    """Return places for units from ``start`` on; the last one has what the slab spares."""
    for unit in units:
        end = slab.nbytes if unit is units[-1] else start + unit.n_bytes
        yield unit, place_in(slab, start, end)
        start = end


def nowhere() -> Place:
    """Return no bytes at all."""
    return Place(*[torch.empty(0, dtype=torch.uint8, device="cpu")] * 2)


class ByteRing:
    """Places ranges one behind the other, wrapping at the end; any range may be freed at any time.

    Freed in the order of placing it is a ring, without fragments; a range that stays in use is
    stepped over.

    Args:
        capacity_bytes: the size of the buffer.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        # in the order of bytes: a plan tries thousands of rings; and one list, which is whole
        # wherever an interrupt comes
        self._ranges: list[tuple[int, int]] = []
        self._head = 0

    @property
    def used_bytes(self) -> int:
        """The bytes of all ranges in use."""
        return sum(end - start for start, end in self._ranges)

    def place(self, n_bytes: int) -> int | None:
        """Take ``n_bytes`` in one piece; their start, or None where no gap is wide enough."""
        # Behind the last one first: freed in the order of placing, there are no fragments then.
        start = self._first_fit(n_bytes, self._head)
        if start is None:
            start = self._first_fit(n_bytes, 0)
        if start is not None:
            insort(self._ranges, (start, start + n_bytes))
            self._head = start + n_bytes
        return start

    def has_room(self, sizes: Iterable[int]) -> bool:
        """Return whether pieces of these sizes could be placed one after the other."""
        # Tried out, not added up: what is free may be in pieces.
        trial = ByteRing(self.capacity_bytes)
        trial._ranges, trial._head = self._ranges.copy(), self._head
        return all(trial.place(n_bytes) is not None for n_bytes in sizes)

    def free(self, start: int) -> None:
        """Give the range that begins at ``start`` back."""
        del self._ranges[bisect_left(self._ranges, (start,))]
        if not self._ranges:
            # So that equal passes use equal places.
            self._head = 0

    def free_but(self, starts: Collection[int]) -> bool:
        """Give all ranges back but those that begin there; whether there were any."""
        lost = dict(self._ranges).keys() - starts
        for start in lost:
            self.free(start)
        return bool(lost)

    def _first_fit(self, n_bytes: int, from_byte: int) -> int | None:
        """Return the first gap that is wide enough, from a byte on that no range contains."""
        place = from_byte
        for start, end in self._ranges[bisect_left(self._ranges, (from_byte,)) :]:
            if place + n_bytes <= start:
                return place
            place = end
        return place if place + n_bytes <= self.capacity_bytes else None


class Fences:
    """For byte ranges, the events after which their last use is over."""

    def __init__(self) -> None:
        self._fences: list[tuple[int, int, Any]] = []

    def add(self, start: int, end: int, event: Any) -> None:
        """Note that the bytes from ``start`` to ``end`` are in use until ``event``."""
        self._fences.append((start, end, event))

    def take(self, start: int, end: int) -> list[Any]:
        """Return and forget the events that a new user of these bytes must wait for.

        See Note [Pages, ring and fences], rule 5.
        """
        events, kept = [], []
        for low, high, event in self._fences:
            if high <= start or end <= low:
                kept.append((low, high, event))
                continue
            events.append(event)
            # The rest of those bytes has not waited yet.
            kept += [(low, start, event)] if low < start else []
            kept += [(end, high, event)] if end < high else []
        self._fences = kept
        return events
