"""Host memory that activations wait in: pinned pieces that are cut, taken and given back.

Invariant: bytes are given out again only with the event after which the copy that read them last is
over. Equal steps take the same bytes, and no new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._cuda_blocks import up_to
from tenure._registries import NamedTensor

from .._device import ByteRing, Fences

ACTIVATIONS = "paged: activations"
"""What reports of memory call activations that are away, and those that came back ahead."""
_ALIGNMENT_BYTES = 512
_LEAST_BYTES = 1 << 20


class _Slab:
    """Memory that is made in one piece."""

    def __init__(self, memory: Any, n_bytes: int) -> None:
        self.memory = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes)
        self.ring = ByteRing(n_bytes)
        self.fences: Fences[Any] = Fences()
        self._kept = memory


class HostBytes(NamedTuple):
    """Bytes of the host that are in use.

    Attributes:
        memory: uint8, they.
        after: the events that who writes to them waits for.
        slab: what they are cut from.
        start: where.
    """

    memory: Tensor
    after: list[Any]
    slab: _Slab
    start: int


class ActivationMemory:
    """Slabs, as many as are needed at the same time.

    Args:
        make: makes memory of so many bytes.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._slabs: list[_Slab] = []

    @property
    def n_bytes(self) -> int:
        """What all of it takes."""
        return sum(slab.memory.nbytes for slab in list(self._slabs))

    def take(self, n_bytes: int) -> HostBytes:
        """Bytes that nobody else has."""
        rounded_bytes = up_to(n_bytes, _ALIGNMENT_BYTES)
        for slab in self._slabs:
            start = slab.ring.place(rounded_bytes)
            if start is not None:
                return self._cut(slab, start, n_bytes)
        # Half of what there is: few pieces are made, and little is left over at their ends.
        size = max(rounded_bytes, _LEAST_BYTES, up_to(self.n_bytes // 2, _ALIGNMENT_BYTES))
        slab = _Slab(self._make(size), size)
        self._slabs.append(slab)
        start = slab.ring.place(rounded_bytes)
        assert start is not None
        return self._cut(slab, start, n_bytes)

    def give_back(self, given: HostBytes, event: Any) -> None:
        """They may be given to others.

        Args:
            given: they.
            event: after which nothing reads them; None if nothing does.
        """
        given.slab.ring.free(given.start)
        if event is not None:
            end = given.start + up_to(given.memory.nbytes, _ALIGNMENT_BYTES)
            given.slab.fences.add(given.start, end, event)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The slabs."""
        for slab in list(self._slabs):
            yield NamedTensor(slab.memory, "activations", ACTIVATIONS)

    def close(self) -> None:
        """Forget them; what is in use keeps its slab."""
        self._slabs.clear()

    def _cut(self, slab: _Slab, start: int, n_bytes: int) -> HostBytes:
        after = slab.fences.take(start, start + up_to(n_bytes, _ALIGNMENT_BYTES))
        return HostBytes(slab.memory[start : start + n_bytes], after, slab, start)
