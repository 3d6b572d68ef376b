"""What graphs save beside weights, on the host until the backward pass asks for it.

What a node saves is copied to the host beside the kernels that follow, and let go when the copy is
over by the device's own time; the backward pass finds it copied back, the last one first. A storage
that several nodes save is copied once. The host's memory, also that for gradients, is in a few
large pieces.

Invariant: of what is away, and of what came back before it is needed, the device holds no more than
twice the largest piece; no byte is read before its copy is there, and none is freed that a copy
still reads or writes. The host waits for nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from tenure._account import taken
from tenure._cuda_blocks import up_to
from tenure._graph_capture import is_capturing
from tenure._registries import NamedTensor
from tenure._storages import storage_of
from tenure._torch.lending import in_own_storage
from tenure._torch.quiet import aside
from tenure._torch.storages import byte_range, key_of
from tenure._torch.writes import counts_with, version_of, writes_of

from ._link import Link
from ._memory import ByteRing, Fences
from ._tensors import UNIT_ALIGNMENT_BYTES

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
        self.fences = Fences()


class HostSlabs:
    """Slabs, as many as are needed at the same time.

    Bytes are given out again only when nothing shows them any more, neither a tensor nor an alias
    of one. Who gets them waits for the copies that may still read them.

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


ACTIVATIONS = "paged: activations"
"""What reports of memory call activations that are away, and those that came back ahead."""
LEAST_BYTES = 1 << 20
"""The host memory that is allocated at once, at the least."""
SMALL_BYTES = 8 << 10
"""What is smaller stays: a copy takes longer to start than these bytes are worth."""
LARGEST_PIECES = 2
"""So many of the largest: one that is copied while the next one is computed with."""
_LOOKED_AT = 64
"""How many of those that were saved before are looked at for what to fetch ahead."""
_MOST_PART = 2
"""A view of less than one in so many bytes of its storage is copied alone."""
_Place = tuple[int, int, int]
"""The key of a storage, and where in it bytes begin and end."""


@dataclass(eq=False, slots=True)
class MovedBytes:
    """The bytes of a storage, or a part of it, and where they are.

    Attributes:
        here: the device's, while they are kept; None if they are away.
        start: the first one's place in the storage that was saved.
        n_bytes: how many.
        on_host: the host's; they are there from ``arrived`` on.
        stream: where they are used.
        storage: that of ``here``, whoever keeps it.
        base: the first one's place in that storage.
        arrived: the copy to the host.
        pending: the copy from or to them that ``stream`` has not waited for.
        serial: the higher, the later it was saved, and the sooner it is needed.
        came_back: whether ``here`` is a copy, and not what was saved.
    """

    here: Tensor | None
    start: int
    n_bytes: int
    on_host: HostBytes
    stream: Any
    storage: weakref.ref[UntypedStorage]
    base: int
    arrived: Any
    pending: Any
    serial: int = 0
    came_back: bool = False


@dataclass(eq=False, slots=True, weakref_slot=True)
class AwayBytes:
    """Some bytes, for as long as a node keeps one of the tensors over them; then somebody is told.

    Attributes:
        bytes: they.
        writes: counts writes to these tensors, which all have one counter.
        n_writes: how many there were.
        forget: is told.
        n_saved: how many nodes keep one of the tensors.
        n_given: how many have had theirs.
    """

    bytes: MovedBytes
    writes: Tensor
    n_writes: int | None
    forget: Callable[[MovedBytes], None]
    n_saved: int = 0
    n_given: int = 0

    def __del__(self) -> None:
        self.forget(self.bytes)


class Moved(NamedTuple):
    """A tensor that was saved, over bytes that may be away.

    Attributes:
        away: the bytes.
        dtype: of it.
        form: its offset in its storage, in elements, its size and its strides.
    """

    away: AwayBytes
    dtype: torch.dtype
    form: tuple[int, torch.Size, tuple[int, ...]]


class Activations:
    """Takes what nodes save to the host, and brings it back.

    Args:
        link: the streams of the device.
        memory: the host's.
    """

    def __init__(self, link: Link, memory: HostSlabs) -> None:
        self._link, self._memory = link, memory
        self._alive: weakref.WeakValueDictionary[int, AwayBytes] = weakref.WeakValueDictionary()
        self._at: weakref.WeakValueDictionary[_Place, AwayBytes] = weakref.WeakValueDictionary()
        # Those of which the device has the bytes.
        self._kept: dict[MovedBytes, None] = {}
        self._next = 0
        self._largest_bytes = 0
        self._streams: dict[int, Any] = {}
        self._lock = Lock()
        # Of nodes that are gone, by whatever thread let go of them, until the lock is free.
        self._gone: deque[MovedBytes] = deque()
        self._closed = False

    def note_stream(self) -> None:
        """Note that the current stream computes, and may free what is saved on another one."""
        stream = self._link.current()
        self._streams[stream.stream_id] = stream

    def take(self, tensor: Tensor) -> Moved | None:
        """Begin to move what a node saves to the host; None if it is to stay.

        Args:
            tensor: it; in no page.
        """
        if type(tensor) is not Tensor or tensor.device != self._link.device:
            return None
        # A leaf that asks for gradients is somebody's parameter.
        if tensor.layout is not torch.strided or (tensor.requires_grad and tensor.is_leaf):
            return None
        storage = storage_of(tensor)
        if storage is None or tensor.numel() * tensor.element_size() < SMALL_BYTES:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        with self._lock, aside():
            away = self._away_of(tensor, storage)
            away.n_saved += 1
            # It is needed again where it was saved last.
            self._alive.pop(away.bytes.serial, None)
            self._next += 1
            away.bytes.serial = self._next
            self._alive[self._next] = away
        self._let_go_of_gone()
        form = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return Moved(away, tensor.dtype, form)

    def give(self, moved: Moved) -> Tensor:
        """Return a saved tensor for the current stream to read, and fetch the next ones.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        away, stream = moved.away, self._link.current()
        with self._lock, aside():
            storage, base = self._here(away.bytes, stream)
            offset, size, strides = moved.form
            at = offset + (base - away.bytes.start) // moved.dtype.itemsize
            made = self._over(storage, moved.dtype, at, size, strides)
            away.n_given += 1
            if away.n_given >= away.n_saved:
                # What other nodes saved of it, they have had; in a second pass all begin anew.
                away.n_given = 0
                self._let_go(away.bytes)
            self._fetch_ahead(away.bytes.serial, stream)
        self._let_go_of_gone()
        return made

    def end(self) -> None:
        """End a backward pass: keep nothing for it."""
        with self._lock:
            for each in list(self._kept):
                self._let_go(each)
        self._let_go_of_gone()

    def close(self) -> None:
        """Let go of it all, when nothing is under way any more."""
        self._closed = True
        self._kept.clear()
        self._gone.clear()

    def _over(self, storage: UntypedStorage, dtype: torch.dtype, *form: Any) -> Tensor:
        empty: Any = torch.empty(0, dtype=dtype, device=self._link.device)
        return empty.set_(storage, *form)  # type: ignore[no-any-return]

    def _away_of(self, tensor: Tensor, storage: UntypedStorage) -> AwayBytes:
        """Return the bytes of a tensor; those that were saved before, if they are the same."""
        start, end = range_to_move(tensor)
        place = key_of(storage), start, end
        known, n_writes = self._at.get(place), version_of(tensor)
        if (
            known is not None
            and known.bytes.storage() is storage
            and known.n_writes == n_writes
            # The number of writes alone does not tell: what is written through `h.data` counts by
            # itself, and may have come to the number of `h`.
            and counts_with(tensor, known.writes)
        ):
            return known
        moving = self._move(storage, start, end)
        away = AwayBytes(moving, writes_of(tensor), n_writes, self._forget)
        self._at[place] = away
        return away

    def _move(self, storage: UntypedStorage, start: int, end: int) -> MovedBytes:
        """Begin to copy bytes of a storage to the host; until that is over they are kept."""
        self.note_stream()
        stream = self._link.current()
        if not self._alive:
            # An attempt before it may have had larger ones.
            self._largest_bytes = 0
        self._largest_bytes = max(self._largest_bytes, end - start)
        self._make_room(end - start)
        here = self._over(storage, torch.uint8, start, (end - start,), (1,))
        on_host = self._memory.take(end - start)
        # Synchronization strategy: the kernels that make it run on this stream, and a copy to the
        # device may still read what was in this place of the host's memory before.
        after = [self._link.mark(stream), *on_host.after]
        arrived = self._link.page_out([(on_host.memory, here)], after)
        kept_by, n_bytes = weakref.ref(storage), end - start
        made = MovedBytes(here, start, n_bytes, on_host, stream, kept_by, start, arrived, arrived)
        self._kept[made] = None
        return made

    def _here(self, wanted: MovedBytes, stream: Any) -> tuple[UntypedStorage, int]:
        """Return a storage on the device that holds some bytes, and the offset of the first."""
        if wanted.came_back and wanted.stream.stream_id != stream.stream_id:
            # Its memory is the other stream's, which may give it to others before this one is done.
            self._let_go(wanted)
        else:
            storage = wanted.storage()
            if storage is not None:
                if wanted.came_back:
                    self._wait(wanted)
                return storage, wanted.base
        self._link.meter.now.faults += 1
        self._fetch(wanted, stream)
        self._wait(wanted)
        assert wanted.here is not None
        return wanted.here.untyped_storage(), 0

    def _fetch_ahead(self, before: int, stream: Any) -> None:
        """Fetch what was saved before, the last one first, as much as is to be here."""
        most_bytes = self._most_bytes
        for serial in range(before - 1, max(0, before - 1 - _LOOKED_AT), -1):
            away = self._alive.get(serial)
            if away is None or away.bytes.here is not None or away.bytes.storage() is not None:
                continue
            saved = away.bytes
            # Those that were skipped are in nobody's way.
            for each in [each for each in self._kept if each.serial > before]:
                if self._kept_bytes + saved.n_bytes > most_bytes:
                    self._let_go(each)
            if self._kept_bytes + saved.n_bytes > most_bytes:
                return
            try:
                self._fetch(saved, stream)
            except torch.OutOfMemoryError:
                # It is fetched when it is needed, where what runs now is over.
                return

    def _fetch(self, wanted: MovedBytes, stream: Any) -> None:
        """Begin to copy bytes back."""
        n_bytes = wanted.n_bytes
        device = self._link.device
        here = taken(lambda: torch.empty(n_bytes, dtype=torch.uint8, device=device), ACTIVATIONS)
        # Synchronization strategy: kernels of this stream may still use the memory that it was
        # given, and the copy to the host may not be over.
        after = [self._link.mark(stream), wanted.arrived]
        arriving = self._link.page_in([(here, wanted.on_host.memory)], after)
        wanted.here, wanted.came_back, wanted.base, wanted.stream = here, True, 0, stream
        wanted.pending = arriving
        wanted.on_host.add_read(arriving)
        wanted.storage = weakref.ref(here.untyped_storage())
        self._kept[wanted] = None

    @property
    def _most_bytes(self) -> int:
        return LARGEST_PIECES * self._largest_bytes

    @property
    def _kept_bytes(self) -> int:
        return sum(each.n_bytes for each in self._kept)

    def _make_room(self, n_bytes: int) -> None:
        """Let go of what is needed last, until so many bytes may be kept beside the others."""
        while self._kept and self._kept_bytes + n_bytes > self._most_bytes:
            self._let_go(min(self._kept, key=lambda each: each.serial))

    def _let_go(self, kept: MovedBytes) -> None:
        """Keep bytes no longer; who keeps them otherwise still has them."""
        if kept in self._kept:
            del self._kept[kept]
            self._wait(kept)
            kept.here = None

    def _wait(self, kept: MovedBytes) -> None:
        """Let streams wait for the copy from or to some bytes, if they have not yet."""
        if kept.pending is None:
            return
        # Synchronization strategy: who gets this memory next writes it on this stream, after the
        # copy that reads it, or reads it after the copy that writes it.
        self._link.let_compute(kept.stream, kept.pending)
        others = [each for key, each in self._streams.items() if key != kept.stream.stream_id]
        for stream in others:
            # The memory may have been made on any of them, and be in use on another.
            for event in (kept.pending, self._link.mark(kept.stream)):
                self._link.let_wait(stream, event)
        kept.pending = None

    def _forget(self, gone: MovedBytes) -> None:
        """Note that no node needs some bytes any more; called anywhere and at any moment."""
        if self._closed:
            return
        self._gone.append(gone)
        # A collection may end a graph while another one is captured, which no wait must get into.
        if not is_capturing(self._link.device):
            self._let_go_of_gone()

    def _let_go_of_gone(self) -> None:
        # Whoever has the lock does this when it has done with it.
        while self._gone and not self._closed and self._lock.acquire(blocking=False):
            try:
                self._let_go(self._gone.popleft())
            except IndexError:
                # Another thread has taken the last one.
                pass
            finally:
                self._lock.release()


def range_to_move(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of a storage that are moved if a tensor over it is saved: begin and end."""
    start, end = byte_range(tensor)
    n_bytes = tensor.untyped_storage().nbytes()
    return (0, n_bytes) if (end - start) * _MOST_PART >= n_bytes else (start, end)
