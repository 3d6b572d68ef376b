"""Slabs of device memory, in which the ring and the units that stay stand side by side.

Invariant: a slab is freed with the last place in it, and each place has a storage of its own: who
shares the bytes of one unit is told from who shares those of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from tenure._torch.lending import in_own_storage

from .._model import Unit


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
    """

    ring_bytes: int
    slabs: tuple[SlabPlan, ...]

    @property
    def sizes(self) -> list[int]:
        """The bytes of each slab."""
        return [slab.n_bytes for slab in self.slabs]

    @property
    def resident_bytes(self) -> int:
        """What the slabs have beside the ring."""
        return sum(self.sizes) - self.ring_bytes


@dataclass(eq=False, slots=True)
class Slab:
    """Memory that is allocated in one piece.

    Attributes:
        memory: uint8, all of it.
        has_ring: whether the ring is in it, which never leaves.
    """

    memory: Tensor
    has_ring: bool = False

    def place(self, start: int, end: int) -> Place:
        """The bytes from ``start`` to ``end``, for one unit or the ring."""
        if start == 0 and end == self.memory.nbytes:
            return Place(self, start, self.memory)
        return Place(self, start, in_own_storage(self.memory, start, end))


@dataclass(eq=False, slots=True)
class Place:
    """Bytes of a slab, at least as many as what stands there.

    Attributes:
        slab: the slab.
        start: their first one in it.
        memory: uint8, these bytes, in a storage of their own.
    """

    slab: Slab = field(repr=False)
    start: int
    memory: Tensor = field(repr=False)

    @property
    def n_bytes(self) -> int:
        """How many bytes."""
        return self.memory.nbytes

    @property
    def end(self) -> int:
        """The byte of the slab behind the last one."""
        return self.start + self.memory.nbytes

    @property
    def around(self) -> tuple[UntypedStorage, ...]:
        """The storage of the slab, where that is another one."""
        if self.memory is self.slab.memory:
            return ()
        return (self.slab.memory.untyped_storage(),)


def joined(places: Sequence[Place]) -> Place:
    """One place over several that are neighbours, in their order."""
    if len(places) == 1:
        return places[0]
    return places[0].slab.place(places[0].start, places[-1].end)


def places_in(slab: Slab, start: int, units: Sequence[Unit]) -> Iterator[tuple[Unit, Place]]:
    """Places for units from ``start`` on; what the slab has to spare is the last one's."""
    for unit in units:
        end = slab.memory.nbytes if unit is units[-1] else start + unit.n_bytes
        yield unit, slab.place(start, end)
        start = end


def nowhere() -> Place:
    """No bytes at all."""
    return Slab(torch.empty(0, dtype=torch.uint8, device="cpu")).place(0, 0)
