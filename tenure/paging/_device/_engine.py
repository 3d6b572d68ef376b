"""Brings units to the device before they are used, and takes their place back after.

Invariant: a unit's bytes are read on a stream only after a wait for their copy, and overwritten
only after a wait for their last use; a unit that is missing, whatever was predicted, is fetched
when it is used. Device memory is allocated at the start, and the host waits only for what changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from tenure._account import taken
from tenure._named_tensors import NamedTensor
from tenure._segments import whole_block_bytes
from tenure._torch.aside import aside
from tenure._torch.unseen import note_while

from .._host import HostStore
from .._link import Link
from .._model import HostTensor, Unit
from ._access_order import AccessOrder
from ._copies import Copies
from ._idle import IdlePages
from ._no_room import refuse
from ._page import RESIDENT, Page
from ._residents import Residents, memory_bytes
from ._ring import ByteRing, Fences
from ._slabs import Arrangement, Place, Slab, joined, nowhere, places_in

RING = "paged: ring"
"""What reports of memory call the bytes that passing units share."""


class Engine:
    """The pages of a model on one device.

    Args:
        link: the streams of the device.
        store: the host bytes.
        max_ahead: how many units may be fetched ahead; None for as many as fit.

    Attributes:
        order: what passes use.
        meter: what was moved.
        saves_buffers: whether every buffer that a forward used is to be written back.
    """

    def __init__(self, link: Link, store: HostStore, max_ahead: int | None = None) -> None:
        self.order = AccessOrder()
        self._copies = Copies(link, store)
        self.meter = self._copies.meter
        self.saves_buffers = False
        self._link, self._store, self._max_ahead = link, store, max_ahead
        self._pages: dict[Unit, Page] = {}
        self._idle = IdlePages()
        self._residents = Residents(self._pages)
        self._beside_bytes = 0
        self._ring = ByteRing(0)
        self._fences: Fences[object] = Fences()
        self._ring_place = nowhere()
        self._end_noting = note_while(self)

    @property
    def resident_bytes(self) -> int:
        """What the units that stay on the device take."""
        return self._residents.n_bytes

    @property
    def staying_bytes(self) -> int:
        """The bytes of these units themselves."""
        return _n_bytes(self._residents.pages())

    @property
    def slab_sizes(self) -> list[int]:
        """The bytes of each piece of the device's memory that units have."""
        slabs = dict.fromkeys([self._ring_place.slab, *self._residents.slabs()])
        return [slab.memory.nbytes for slab in slabs]

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

    @property
    def pinned_bytes(self) -> int:
        """How much of it, and of what is between files and the device, is pinned."""
        return self._store.pinned_bytes + self._link.pinned_bytes

    def reserve(
        self, arrangement: Arrangement, kept: frozenset[Unit], beside_bytes: int
    ) -> dict[Unit, Place]:
        """Allocate the ring, and memory for units that are to stay.

        Args:
            arrangement: where these are to stand.
            kept: units that stay whatever happens.
            beside_bytes: what else of the budget is taken, for who names budgets.
        """
        self._residents.kept, self._beside_bytes = kept, beside_bytes
        reserved: dict[Unit, Place] = {}
        ring_bytes = arrangement.ring_bytes
        for slab_plan in arrangement.slabs:
            slab = self._allocate(slab_plan.n_bytes, RING if ring_bytes else RESIDENT)
            if ring_bytes:
                self._give_to_ring(slab, ring_bytes)
            with aside():
                reserved.update(places_in(slab, ring_bytes, slab_plan.units))
            ring_bytes = 0
        return reserved

    def fill_residents(self, reserved: dict[Unit, Place]) -> None:
        """Fill the memory of units that stay.

        Raises:
            PagingError: a file that holds them can't be read.
        """
        for unit, place in reserved.items():
            now = self._link.mark(self._link.current())
            self._page_in(Page(unit, place.memory, 0, place), [now])
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
            self._copies.refresh(page)
        self._copies.let_compute(page, may_retry=was_fetched)
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
        """The page of a unit that is acquired now, for the current stream to read as well."""
        page = self._pages.get(unit)
        if page is None or not page.users:
            return None
        self._copies.let_compute(page)
        return page

    def release(self, page: Page) -> None:
        """End one use of a page: what was written to it goes back to the host."""
        page.users -= 1
        if page.users:
            return
        page.last_use = None
        changed = page.written(with_buffers=self.saves_buffers)
        if changed:
            self._copies.write_back(page, changed)
        if not page.is_resident:
            self._idle.add(page)
            if page.unit in self._idle.free():
                page.last_use = self._copies.marks_of(page)

    def save(self) -> None:
        """Stop the host until what was written so far to units in use is there."""
        for page in [page for page in self._pages.values() if page.users]:
            changed = page.written(with_buffers=self.saves_buffers)
            if changed:
                self._copies.write_back(page, changed)
        self._copies.let_host_look()

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
        self._copies.let_host_read()

    def let_host_write(self, host: HostTensor) -> None:
        """Stop the host until no copy reads a tensor; it counts as changed from now on."""
        host.touched = True
        if host.unit is not None:
            self._copies.wait_for_copies(host.unit)

    def give_back(self, n_bytes: int) -> int:
        """Let go of slabs of idle resident units, until so many bytes are free; they pass then.

        Returns:
            The bytes that were freed; 0 where in each slab one is in use or too large for the ring.
        """
        return self._let_go(self._residents.to_give_back(n_bytes, self._ring.capacity_bytes))

    def close(self) -> None:
        """Stop the host until nothing is under way; then let go of the device's memory."""
        self._end_noting()
        self._link.finish()
        self._link.close()
        self._copies.clear()
        self._pages.clear()
        self._idle.clear()
        self._ring_place = nowhere()

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The ring, each unit that stays, and what the link stages."""
        ring = self._ring_place
        if ring.memory.nbytes:
            inside = [storage for page in self._passing() for storage in page.storages]
            yield NamedTensor(ring.memory, "ring", RING, (*inside, *ring.around))
        yield from self._residents.named_tensors()
        yield from self._link.named_tensors()

    def _allocate(self, n_bytes: int, what: str) -> Slab:
        def make() -> Tensor:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self._link.device)

        with aside():
            return Slab(taken(make, what))

    def _give_to_ring(self, slab: Slab, n_bytes: int) -> None:
        slab.has_ring = True
        self._ring = ByteRing(n_bytes)
        with aside():
            self._ring_place = slab.place(0, n_bytes)
        self._fences.add(0, n_bytes, self._link.mark(self._link.current()))

    def _fetch(self, unit: Unit, start: int) -> Page:
        page = Page(unit, self._ring_place.memory, start)
        self._page_in(page, self._fences.take(start, start + unit.n_bytes))
        self._idle.add(page)
        return page

    def _page_in(self, page: Page, after: list[object]) -> Page:
        self._copies.fill(page, after)
        self._pages[page.unit] = page
        return page

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

    def _passing(self) -> list[Page]:
        pages = list(self._pages.values())  # at once: another thread may ask for a report
        return [page for page in pages if not page.is_resident]

    def _let_go(self, slabs: list[Slab]) -> int:
        """Free slabs with all that is in them; how many bytes."""
        n_bytes = sum(slab.memory.nbytes for slab in slabs)
        if slabs:
            self._link.finish()  # before the memory goes: any stream may still read it
        for page in self._residents.on(slabs):
            del self._pages[page.unit]
        return n_bytes

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
        soon = self.order.soon()
        self._drop(max(idle.values(), key=lambda page: soon.get(page.unit, len(soon))))
        return True

    def _fetch_to_stay(self, unit: Unit) -> Page:
        """Fetch a unit to where others stayed, as what passes leaves no room; those pass now."""
        place, after = self._place_of_others(unit)
        return self._page_in(Page(unit, place.memory, 0, place), after)

    def _place_of_others(self, unit: Unit) -> tuple[Place, list[object]]:
        """A place for a unit, and the events that it is in use until."""
        row = self._residents.to_stand_in_for(unit.n_bytes, self.order.soon())
        if not row:
            return self._place_in_new_slab(unit), []
        after = [event for page in row for event in self._copies.uses_of(page)]
        for page in row:
            del self._pages[page.unit]
        with aside():
            return joined([page.place for page in row if page.place is not None]), after

    def _place_in_new_slab(self, unit: Unit) -> Place:
        """A place in the stead of whole slabs."""
        residents = self._residents
        n_bytes = whole_block_bytes(unit.n_bytes, self.device)
        slabs = residents.to_replace(n_bytes)
        if slabs is None:
            self._refuse(unit)
        residents.spare_bytes += self._let_go(slabs)
        del slabs  # which are to be free before as much is allocated
        self._link.release_cached()  # or they would stay reserved beside what is allocated now
        slab = self._allocate(n_bytes, RESIDENT)
        residents.spare_bytes -= n_bytes
        return slab.place(0, n_bytes)

    def _drop(self, page: Page) -> None:
        """Give a page's place back, if nothing holds it; who takes it waits for its last use."""
        if not self._idle.take(page):
            return
        del self._pages[page.unit]
        end = page.start + page.unit.n_bytes
        for event in self._copies.uses_of(page):
            self._fences.add(page.start, end, event)
        self._ring.free(page.start)

    def _refuse(self, unit: Unit) -> NoReturn:
        ring_bytes, here_bytes = self._ring.capacity_bytes, self.resident_bytes
        leaving_bytes = memory_bytes(self._residents.leaving())
        needed_bytes = self._ring.used_bytes + here_bytes - leaving_bytes + unit.n_bytes
        whole_bytes = ring_bytes + here_bytes + self._residents.spare_bytes
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
