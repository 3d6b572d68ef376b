"""Brings units to the device before they are used, and takes their place back after.

Invariant: a unit's bytes are read on a stream only after a wait for their copy, and overwritten
only after a wait for their last use; a unit that is missing, whatever was predicted, is fetched
when it is used. Device memory is allocated at the start, and the host waits only for what changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from tenure._account import taken
from tenure._errors import PagingError
from tenure._named_tensors import NamedTensor

from ._host_buffers import HostStore
from ._idle import IdlePages
from ._link import Link
from ._meter import Meter
from ._no_room import refuse
from ._order import AccessOrder
from ._page import RESIDENT, Page
from ._ring import ByteRing, Fences
from ._table import HostTensor
from ._torch_aside import aside
from ._torch_unseen import note_while
from ._units import Unit

RING = "paged: ring"
"""What reports of memory call the bytes that passing units share."""


class Engine:
    """The pages of a model on one device.

    Args:
        link: the streams of the device.
        store: the host bytes.
        ring_bytes: the memory that passing units share.
        max_ahead: how many units may be fetched ahead; None for as many as fit.

    Attributes:
        order: what passes use.
        meter: what was moved.
        saves_buffers: whether every buffer that a forward used is to be written back.
    """

    def __init__(
        self, link: Link, store: HostStore, ring_bytes: int, max_ahead: int | None = None
    ) -> None:
        self.order = AccessOrder()
        self.meter = Meter(link)
        self.saves_buffers = False
        self._link, self._store, self._max_ahead = link, store, max_ahead
        self._pages: dict[Unit, Page] = {}
        self._idle = IdlePages()
        self._kept: frozenset[Unit] = frozenset()
        self._beside_bytes = self._spare_bytes = 0
        self._ring = ByteRing(ring_bytes)
        self._fences: Fences[object] = Fences()
        self._arena = self._allocate(ring_bytes, RING)
        self._fences.add(0, ring_bytes, link.mark(link.current()))
        self._copied: dict[Unit, object] = {}
        self._written: dict[Unit, object] = {}
        self._unread: list[object] = []
        self._end_noting = note_while(self)

    @property
    def resident_bytes(self) -> int:
        """What the units that stay on the device take."""
        return _memory_bytes(self._resident())

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._link.device

    @property
    def ring_bytes(self) -> int:
        """The memory that passing units share."""
        return self._ring.capacity_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory between files and the device."""
        return self._link.staging_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that holds the weights."""
        return self._store.host_bytes

    def reserve(
        self, units: list[Unit], kept: frozenset[Unit], beside_bytes: int
    ) -> dict[Unit, Tensor]:
        """Allocate memory for units that are to stay.

        Args:
            units: those.
            kept: units that stay whatever happens.
            beside_bytes: what else of the budget is taken, for who names budgets.
        """
        self._kept, self._beside_bytes = kept, beside_bytes
        return {unit: self._allocate(unit.n_bytes, RESIDENT) for unit in units}

    def settle_in(self, reserved: dict[Unit, Tensor]) -> None:
        """Fill the memory of units that stay.

        Raises:
            PagingError: a file that holds them can't be read.
        """
        for unit, memory in reserved.items():
            now = self._link.mark(self._link.current())
            self._page_in(Page(unit, memory, 0, is_resident=True), [now])
        for page in self._pages.values():
            self._link.check(page.ready)

    def begin(self) -> None:
        """Nothing is in use: take back what an interruption kept from being released."""
        self._idle.clear()
        for page in self._pages.values():
            page.users = 0
            if not page.is_resident:
                self._idle.add(page)
        if self._ring.free_but({page.start for page in self._passing()}):
            self._link.finish()  # nobody noted when the use of those places ends

    def acquire_all(self, units: list[Unit]) -> Iterator[Page]:
        """Have several units on the device at the same time, each as by ``acquire``."""
        self._make_way(units)
        yield from map(self.acquire, units)

    def acquire(self, unit: Unit) -> Page:
        """Have a unit on the device, for the current stream to read, until it is released.

        Raises:
            PagingError: what is in use leaves no room for it, or its file can't be read.
        """
        page = self._pages.get(unit)
        was_fetched = page is not None
        if page is None or not page.users:
            self.order.note(unit)
        if page is None:
            self.meter.note_fault()
            page = self._fetch_now(unit)
        elif page.stale():
            self._refresh(page)
        self._let_compute(page, may_retry=was_fetched)
        page.users += 1
        self._idle.discard(page)
        return page

    def stays(self, unit: Unit) -> bool:
        """Whether a unit stays on the device."""
        page = self._pages.get(unit)
        return page is not None and page.is_resident

    def pages(self) -> list[Page]:
        """The units that are on the device."""
        return list(self._pages.values())

    def page_in_use(self, unit: Unit) -> Page | None:
        """The page of a unit that is acquired now."""
        page = self._pages.get(unit)
        return page if page is not None and page.users else None

    def release(self, page: Page) -> None:
        """End one use of a page: what was written to it goes back to the host."""
        page.users -= 1
        if page.users:
            return
        page.last_use = None
        changed = page.written(with_buffers=self.saves_buffers)
        if changed:
            self._write_back(page, changed)
        if not page.is_resident:
            self._idle.add(page)
            if page.unit in self._idle.free():
                page.last_use = self._marks(page)

    def save(self) -> None:
        """Stop the host until what was written so far to units in use is there."""
        for page in [page for page in self._pages.values() if page.users]:
            changed = page.written(with_buffers=self.saves_buffers)
            if changed:
                self._write_back(page, changed)
        for event in self._unread:
            self._link.let_host(event)

    def prefetch(self) -> None:
        """Let go of pages that are not wanted soon, and fetch those that are."""
        wanted = self._wanted()
        for page in list(self._idle.free().values()):
            if page.unit not in wanted:
                self._drop(page)
        for unit in wanted:
            if unit not in self._pages:
                start = self._ring.place(unit.n_bytes)
                if start is None:
                    return
                self._fetch(unit, start)

    def let_host_read(self) -> None:
        """Stop the host until what was written back is there; at once where nothing was."""
        for event in self._unread:
            self._link.let_host(event)
        self._unread.clear()
        self._written.clear()

    def let_host_write(self, host: HostTensor) -> None:
        """Stop the host until no copy reads a tensor; it counts as changed from now on."""
        host.touched = True
        if host.unit is not None:
            self._settle(host.unit)

    def give_back(self, n_bytes: int) -> int:
        """Let go of idle resident units, until so many bytes are free; they pass from now on.

        Returns:
            The bytes that were freed; 0 where all residents are in use or too large for the ring.
        """
        movable = [p for p in self._leaving() if p.unit.n_bytes <= self._ring.capacity_bytes]
        movable.sort(key=lambda page: page.memory.nbytes)
        return self._let_go(_first(movable, n_bytes))

    def close(self) -> None:
        """Stop the host until nothing is under way; then let go of the device's memory."""
        self._end_noting()
        self._link.finish()
        self._link.close()
        self._unread.clear()
        self._pages.clear()
        self._idle.clear()
        self._arena = torch.empty(0)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The ring, each unit that stays, and what the link stages."""
        inside = [storage for page in self._passing() for storage in page.storages]
        yield NamedTensor(self._arena, "ring", RING, tuple(inside))
        for page in self._resident():
            yield NamedTensor(page.memory, page.unit.name, RESIDENT, page.storages)
        yield from self._link.named_tensors()

    def _allocate(self, n_bytes: int, what: str) -> Tensor:
        def make() -> Tensor:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self._link.device)

        with aside():
            return taken(make, what)

    def _fetch(self, unit: Unit, start: int) -> Page:
        page = Page(unit, self._arena, start, is_resident=False)
        self._page_in(page, self._fences.take(start, start + unit.n_bytes))
        self._idle.add(page)
        return page

    def _page_in(self, page: Page, after: list[object]) -> Page:
        unit = page.unit
        with aside():
            pair = page.bytes_of(0, unit.n_bytes), self._host_bytes(unit)
        page.note_copied()
        page.ready = self._copy_in(unit, [pair], after)
        self._pages[unit] = page
        return page

    def _host_bytes(self, unit: Unit) -> Any:
        if any(host.has_left for host in unit.tensors):
            self._settle(unit)  # before it is brought back to where copies read
        return self._store.bytes_of(unit)

    def _settle(self, unit: Unit) -> None:
        """Stop the host until no copy reads a unit's host bytes."""
        copied = self._copied.pop(unit, None)
        if copied is not None:
            self._link.let_host(copied)

    def _refresh(self, page: Page) -> None:
        """Copy anew what may have changed on the host."""
        changed = page.stale()
        with aside():
            source = self._host_bytes(page.unit)
        page.note_copied()
        spans = dict(map(page.unit.span_of, changed))
        with aside():
            pairs = [
                (page.bytes_of(start, n_bytes), source[start : start + n_bytes])
                for start, n_bytes in spans.items()
            ]
        try:
            page.ready = self._copy_in(page.unit, pairs, self._marks(page))
        except BaseException:  # an interruption, too: what was noted was not copied
            page.forget_copied()
            raise
        page.waited.clear()

    def _copy_in(
        self, unit: Unit, pairs: list[tuple[Tensor, Tensor]], after: list[object]
    ) -> object:
        if unit in self._written:
            after = [*after, self._written.pop(unit)]
        with aside():
            event = self.meter.page_in(pairs, after)
        self._copied[unit] = event
        return event

    def _write_back(self, page: Page, changed: list[HostTensor]) -> None:
        shown = [page.shown(host) for host in changed]
        with aside():
            pairs = [
                (_writable(host.tensor), tensor)
                for host, tensor in zip(changed, shown, strict=True)
            ]
            event = self._link.page_out(pairs, self._marks(page))
        self._written[page.unit] = event
        self._unread.append(event)
        page.ready = event  # what is written there next must not overtake the copy
        page.waited.clear()
        page.host_versions = [host.version for host in page.unit.tensors]

    def _let_compute(self, page: Page, *, may_retry: bool = False) -> None:
        stream = self._link.current()
        if stream.stream_id not in page.waited:
            try:
                self.meter.let_compute(stream, page.ready)
            except PagingError:  # its file could not be read; ahead of use that need not be the end
                page.forget_copied()
                if not may_retry:
                    raise
                self._refresh(page)
                return self._let_compute(page)
            page.waited.add(stream.stream_id)
        page.streams[stream.stream_id] = stream

    def _marks(self, page: Page) -> list[object]:
        """Events after all that was launched so far on the streams that have used a page."""
        return [self._link.mark(stream) for stream in page.streams.values()]

    def _wanted(self) -> dict[Unit, None]:
        """The units that come next, as many as the ring can hold beside those in use."""
        idle = self._idle.free()
        room_bytes = self._ring.capacity_bytes - self._ring.used_bytes + _n_bytes(idle.values())
        wanted: dict[Unit, None] = {}
        for unit in self.order.upcoming():
            if unit in wanted or (unit in self._pages and unit not in idle):
                continue
            room_bytes -= unit.n_bytes
            if room_bytes < 0 or len(wanted) == self._max_ahead:
                break
            wanted[unit] = None
        return wanted

    def _resident(self) -> list[Page]:
        pages = list(self._pages.values())  # at once: another thread may ask for a report
        return [page for page in pages if page.is_resident]

    def _passing(self) -> list[Page]:
        pages = list(self._pages.values())  # see above
        return [page for page in pages if not page.is_resident]

    def _leaving(self) -> list[Page]:
        """The resident pages that could pass from now on: nothing uses, holds or keeps them."""
        return [
            page
            for page in self._resident()
            if not page.users and page.unit not in self._kept and not page.is_held()
        ]

    def _let_go(self, residents: list[Page]) -> int:
        """Free the memory of residents; how many bytes."""
        if residents:
            self._link.finish()  # before the memory goes: any stream may still read it
        for page in residents:
            del self._pages[page.unit]
        return _memory_bytes(residents)

    def _make_way(self, units: list[Unit]) -> None:
        """Let go of what is in the way of several units, each of which would fit alone."""
        while not self._ring.has_room([u.n_bytes for u in units if u not in self._pages]):
            if not self._drop_last_needed():
                return

    def _fetch_now(self, unit: Unit) -> Page:
        """Fetch a unit that is needed now, at the cost of those needed last."""
        while (start := self._ring.place(unit.n_bytes)) is None:
            if not self._drop_last_needed():
                return self._fetch_to_stay(unit)
        return self._fetch(unit, start)

    def _drop_last_needed(self) -> bool:
        """Give the place of the idle page back that is needed last; whether there was any."""
        idle = self._idle.free()
        if not idle:
            return False
        soon = self._soon()
        self._drop(max(idle.values(), key=lambda page: soon.get(page.unit, len(soon))))
        return True

    def _soon(self) -> dict[Unit, int]:
        """The units that come next, each with how many come before it."""
        return {unit: i for i, unit in reversed(list(enumerate(self.order.upcoming())))}

    def _fetch_to_stay(self, unit: Unit) -> Page:
        """Fetch a unit to where others stayed, as what passes leaves no room; those pass now."""
        memory, after = self._memory_of_residents(unit)
        return self._page_in(Page(unit, memory, 0, is_resident=True), after)

    def _memory_of_residents(self, unit: Unit) -> tuple[Tensor, list[object]]:
        """Memory for a unit, and the events that it is in use until."""
        leaving = self._leaving()
        large = [page for page in leaving if page.memory.nbytes >= unit.n_bytes]
        if large:
            soon = self._soon()
            page = min(large, key=lambda p: (p.memory.nbytes, -soon.get(p.unit, len(soon))))
            del self._pages[page.unit]
            return page.memory, self._uses_of(page)
        if self._spare_bytes + _memory_bytes(leaving) < unit.n_bytes:
            self._refuse(unit)
        leaving.sort(key=lambda page: -page.memory.nbytes)
        self._spare_bytes += self._let_go(_first(leaving, unit.n_bytes - self._spare_bytes))
        self._spare_bytes -= unit.n_bytes
        del leaving, large  # what they list is to be free before as much is allocated
        return self._allocate(unit.n_bytes, RESIDENT), []

    def _drop(self, page: Page) -> None:
        """Give a page's place back, if nothing holds it; who takes it waits for its last use."""
        if not self._idle.take(page):
            return
        del self._pages[page.unit]
        end = page.start + page.unit.n_bytes
        for event in self._uses_of(page):
            self._fences.add(page.start, end, event)
        self._ring.free(page.start)

    def _uses_of(self, page: Page) -> list[object]:
        """The events after which nothing reads or writes a page that was let go."""
        uses = self._marks(page) if page.last_use is None else page.last_use
        written = self._written.get(page.unit)
        return uses if written is None else [*uses, written]

    def _refuse(self, unit: Unit) -> NoReturn:
        ring_bytes, here_bytes = self._ring.capacity_bytes, _memory_bytes(self._resident())
        leaving_bytes = _memory_bytes(self._leaving())
        needed_bytes = self._ring.used_bytes + here_bytes - leaving_bytes + unit.n_bytes
        whole_bytes = ring_bytes + here_bytes + self._spare_bytes
        # there may be room, but in several places; and what holds weights, holds others next time
        needed_bytes = max(needed_bytes, whole_bytes + max(unit.n_bytes, whole_bytes // 4))
        refuse(
            unit,
            self._link.device,
            ring_bytes,
            [page for page in self._pages.values() if page.users or page.held()],
            needed_bytes + self._beside_bytes,
        )


def _n_bytes(pages: Iterable[Page]) -> int:
    return sum(page.unit.n_bytes for page in pages)


def _writable(tensor: Tensor) -> Tensor:
    """A tensor to write to; one that was made in inference mode is not to be, outside of that."""
    if not tensor.is_inference():
        return tensor
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    return view.set_(storage, offset, tensor.size(), tensor.stride())


def _first(pages: list[Page], n_bytes: int) -> list[Page]:
    """As many of the pages as take so many bytes together, or all."""
    taken = accumulate((page.memory.nbytes for page in pages), initial=0)
    return [page for page, before in zip(pages, taken, strict=False) if before < n_bytes]


def _memory_bytes(pages: Iterable[Page]) -> int:
    """What pages with memory of their own take: others may have used it before."""
    return sum(page.memory.nbytes for page in pages)
