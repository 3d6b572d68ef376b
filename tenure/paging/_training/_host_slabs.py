"""Host memory in a few large pieces, for gradients and for activations that are away.

Invariant: bytes are given out again only when nothing shows them any more, neither a tensor nor an
alias of one. Who gets them waits for the copies that may still read them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from tenure._cuda_blocks import up_to
from tenure._registries import NamedTensor
from tenure._torch.lending import in_own_storage
from tenure._torch.quiet import aside

from .._device import ByteRing, Fences
from .._model import UNIT_ALIGNMENT_BYTES

_LEAST_PART = 8
"""A new slab has at least one in so many bytes of all before it, so that slabs are few."""


class HostBytes(NamedTuple):
    """Bytes that are in use as long as anything lies in their storage.

    Attributes:
        memory: uint8, in a storage of its own.
        after: the events that who writes to them waits for.
        add_read: notes the event of a copy that reads them.
    """

    memory: Tensor
    after: list[Any]
    add_read: Callable[[Any], None]


class _HostSlab:
    def __init__(self, memory: Any, n_bytes: int) -> None:
        self.memory = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes)
        self.ring = ByteRing(n_bytes)
        self.fences: Fences[Any] = Fences()


class HostSlabs:
    """Slabs, as many as are needed at the same time.

    Args:
        make: makes memory of so many bytes.
        what: what reports of memory call it, where nothing in use lies in it.
        least_bytes: the size of the smallest slab.
    """

    def __init__(self, make: Callable[[int], Any], what: str, least_bytes: int = 0) -> None:
        self._make, self._what, self._least_bytes = make, what, least_bytes
        # The one that was used last stands last.
        self._slabs: list[_HostSlab] = []
        self._places: dict[weakref.ref[UntypedStorage], tuple[_HostSlab, int]] = {}
        # Storages that are gone, by whatever thread let go of them.
        self._gone: deque[weakref.ref[UntypedStorage]] = deque()

    @property
    def n_bytes(self) -> int:
        """The bytes of all slabs."""
        return sum(slab.memory.nbytes for slab in list(self._slabs))

    def take(self, n_bytes: int, slab_bytes: int = 0) -> HostBytes:
        """Return bytes that nothing else uses.

        Args:
            n_bytes: how many.
            slab_bytes: the least that is allocated if no slab has room.
        """
        while self._gone:
            slab, start = self._places.pop(self._gone.popleft())
            slab.ring.free(start)
        rounded_bytes = up_to(max(1, n_bytes), UNIT_ALIGNMENT_BYTES)
        for slab in reversed(self._slabs):
            found = slab.ring.place(rounded_bytes)
            if found is not None:
                self._slabs.remove(slab)
                break
        else:
            part_bytes = up_to(self.n_bytes // _LEAST_PART, UNIT_ALIGNMENT_BYTES)
            size = max(rounded_bytes, slab_bytes, self._least_bytes, part_bytes)
            slab = _HostSlab(self._make(size), size)
            found = slab.ring.place(rounded_bytes)
            assert found is not None
        self._slabs.append(slab)
        start, end = found, found + rounded_bytes
        with aside():
            memory = in_own_storage(slab.memory, start, start + n_bytes)
        self._places[weakref.ref(memory.untyped_storage(), self._gone.append)] = slab, start
        return HostBytes(memory, slab.fences.take(start, end), partial(slab.fences.add, start, end))

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the slabs, with the storages in them."""
        inside = [(slab, storage()) for storage, (slab, _) in list(self._places.items())]
        for slab in list(self._slabs):
            storages = tuple(each for at, each in inside if at is slab and each is not None)
            yield NamedTensor(slab.memory, self._what.rpartition(" ")[2], self._what, storages)

    def close(self) -> None:
        """Forget them; what is in use keeps its slab."""
        self._slabs.clear()
        self._places.clear()
        self._gone.clear()
