"""Where pages are on the device, and which of them go when there is no room.

Invariant: all memory is allocated at the start; later, only in the stead of slabs that were let go,
or as a budget that changes allows. Who takes a place learns of every event that its earlier use
ends with.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from tenure._account import taken
from tenure._cuda_blocks import whole_block_bytes
from tenure._errors import PagingError
from tenure._heap import wait_for_readers
from tenure._registries import NamedTensor
from tenure._text import format_bytes, listed
from tenure._torch.quiet import aside

from .._link import Link
from .._model import HostTensor, Unit
from ._copies import Copies
from ._lease import Lease
from ._memory import Arrangement, ByteRing, Fences, Place, Slab, SlabPlan, nowhere, places_in
from ._page import RESIDENT, IdlePages, Page
from ._pass import Pass
from ._residents import Residents, memory_bytes

RING = "paged: ring"
"""What reports of memory call the bytes that passing units share."""
_N_NAMED = 4
_ADVICE = (
    "What holds tensors beyond their use is a variable, a view or a container, in the code of the "
    "model or in yours: clone() what is kept, or "
)

Found = tuple[Page, list[object]]
"""A page yet to be filled, and the events that its place is in use until."""


class Room:
    """The ring of a model, and the slabs beside it.

    Args:
        link: the streams of the device.
        copies: what goes between the host and the pages.

    Attributes:
        pages: the units that are on the device.
        idle: those that pass and are not in use.
        lease: what the budget allows from pass to pass.
        written_in_graphs: the weights of pages that are gone which the pass has written in place
            as part of a graph.
    """

    def __init__(self, link: Link, copies: Copies) -> None:
        self.pages: dict[Unit, Page] = {}
        self.idle = IdlePages()
        self._link, self._copies = link, copies
        self._residents = Residents(self.pages)
        self._beside_bytes = 0
        # Of slabs that were let go, what nothing took since.
        self._spare_bytes = 0
        self._ring = ByteRing(0)
        self._fences: Fences[object] = Fences()
        self._ring_place = nowhere()
        self.lease = Lease()
        self.written_in_graphs: list[HostTensor] = []
        self._slab_plans: list[SlabPlan] = []
        # Those that are in use keep them: one goes with the last place in it.
        self._slabs: list[weakref.ref[Slab]] = []

    @property
    def ring_bytes(self) -> int:
        """The memory that passing units share."""
        return self._ring.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """What of the ring no page takes."""
        return self._ring.capacity_bytes - self._ring.used_bytes

    @property
    def resident_bytes(self) -> int:
        """What the units that stay on the device take."""
        return self._residents.n_bytes

    @property
    def staying_bytes(self) -> int:
        """The bytes of these units themselves."""
        return n_bytes_of(self._residents.pages())

    @property
    def slab_sizes(self) -> list[int]:
        """The bytes of each piece of the device's memory that units have."""
        return [slab.memory.nbytes for slab in self._slabs_here()]

    @property
    def held_bytes(self) -> int:
        """All that it has of the device, and what it may take at once in the stead of that."""
        return sum(self.slab_sizes) + self._spare_bytes

    @property
    def lasting_bytes(self) -> int:
        """What of that can't be given back whatever happens."""
        return self._ring_place.slab.memory.nbytes

    @property
    def most_bytes(self) -> int:
        """What it could have, if all units stayed."""
        return sum(plan.n_bytes for plan in self._slab_plans)

    @property
    def least_step_bytes(self) -> int:
        """The smallest slab that it could take; 0 where all are here."""
        return min((plan.n_bytes for plan in self._missing().values()), default=0)

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
        if arrangement.later is not None:
            self._slab_plans = [*arrangement.slabs, *arrangement.later]
        for rank, slab_plan in enumerate(arrangement.slabs):
            slab = self._allocate(slab_plan.n_bytes, RING if ring_bytes else RESIDENT)
            slab.rank = rank if self._slab_plans else 0
            if ring_bytes:
                self._give_to_ring(slab, ring_bytes)
            with aside():
                reserved.update(places_in(slab, ring_bytes, slab_plan.units))
            ring_bytes = 0
        return reserved

    def take_back(self) -> None:
        """Nothing is in use: take back what an interruption kept from being released."""
        self.idle.clear()
        for page in self.pages.values():
            page.users = 0
            if not page.is_resident:
                self.idle.add(page)
        if self._ring.free_but({page.start for page in self._passing()}):
            # Synchronization strategy: an interruption has lost a page, or the copy to one, before
            # the end of its use was noted. No event is left to wait for, so the host waits for all
            # that runs; else the next copy to that place would overtake what still reads it.
            self._link.finish()

    @property
    def expected(self) -> Collection[Unit]:
        """The units that places beside the ring wait for."""
        return self._residents.vacant.keys()

    def note_here(self, page: Page) -> None:
        """A page is being filled: it is here from now on."""
        self.pages[page.unit] = page
        self._residents.vacant.pop(page.unit, None)
        if not page.is_resident:
            self.idle.add(page)

    def free_page(self, unit: Unit) -> Found | None:
        """A page for a unit in the place that waits for it, or where the ring has room."""
        # It waits until the page is here: an interruption between would lose it.
        waiting = self._residents.vacant.get(unit)
        if waiting is not None:
            place, event = waiting
            return Page(unit, place.memory, 0, place), [event]
        start = self._ring.place(unit.n_bytes)
        if start is None:
            return None
        after = self._fences.take(start, start + unit.n_bytes)
        return Page(unit, self._ring_place.memory, start), after

    def at_once(self, unit: Unit, now: Pass) -> Found:
        """A page for a unit that is needed now, at the cost of those that are needed last.

        Raises:
            PagingError: what is in use leaves no room for it.
        """
        while (found := self.free_page(unit)) is None:
            # While another thread has a list of all objects, as at the end of a scope, every
            # weight has one more holder, so no page looks free.
            if not self._drop_last_needed(now) and not wait_for_readers():
                return self._to_stay(unit)
        return found

    def make_way(self, units: list[Unit], now: Pass) -> None:
        """Let go of what is in the way of several units, each of which would fit alone."""
        vacant = self._residents.vacant
        needed = [u.n_bytes for u in units if u not in self.pages and u not in vacant]
        while needed and not self._ring.has_room(needed):
            if not self._drop_last_needed(now):
                return

    def drop(self, page: Page) -> None:
        """Give a page's place back, if nothing holds it; who takes it waits for its last use."""
        if not self.idle.take(page):
            return
        del self.pages[page.unit]
        self.written_in_graphs += page.end_aliases()
        end = page.start + page.unit.n_bytes
        for event in self._copies.uses_of(page):
            self._fences.add(page.start, end, event)
        self._ring.free(page.start)

    def give_back(self, n_bytes: int) -> int:
        """Let go of slabs of idle resident units, until so many bytes are free; they pass then.

        Returns:
            The bytes that were freed; 0 where in each slab one is in use or too large for the ring.
        """
        return self._let_go(self._residents.to_give_back(n_bytes, self._ring.capacity_bytes))

    def take(self, n_bytes: int) -> int:
        """Allocate slabs that are not here, of at most so many bytes in all.

        Their units are copied to them when they are next fetched, for the pass that needs them.

        Returns:
            The bytes of the slabs; fewer where the device has no room for one.
        """
        taken_bytes = 0
        for rank, plan in self._missing().items():
            if taken_bytes + plan.n_bytes > n_bytes:
                continue
            try:
                slab = self._allocate(plan.n_bytes, RESIDENT)
            except torch.OutOfMemoryError:
                break
            slab.rank = rank
            self._expect(slab, plan)
            taken_bytes += plan.n_bytes
        return taken_bytes

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The ring, and each unit that stays."""
        ring = self._ring_place
        if ring.memory.nbytes:
            inside = [storage for page in self._passing() for storage in page.storages]
            yield NamedTensor(ring.memory, "ring", RING, (*inside, *ring.around))
        yield from self._residents.named_tensors()

    def close(self) -> None:
        """Let go of the device's memory."""
        self.pages.clear()
        self.idle.clear()
        self._residents.vacant.clear()
        self._ring_place = nowhere()

    def _missing(self) -> dict[int, SlabPlan]:
        """The slabs that could come, by their rank."""
        here = {slab.rank for slab in self._slabs_here()}
        return {i: p for i, p in enumerate(self._slab_plans) if i and i not in here}

    def _expect(self, slab: Slab, plan: SlabPlan) -> None:
        """Have the places of a new slab wait for its units, but for those that stay elsewhere."""
        # Synchronization strategy: as for the ring, see _give_to_ring.
        free = self._link.mark(self._link.current())
        with aside():
            places = list(places_in(slab, 0, plan.units))
        for unit, place in places:
            page = self.pages.get(unit)
            if page is None or not page.is_resident:
                self._residents.vacant[unit] = place, free

    def _allocate(self, n_bytes: int, what: str) -> Slab:
        def make() -> Tensor:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self._link.device)

        with aside():
            slab = Slab(taken(make, what))
        self._slabs = [each for each in self._slabs if each() is not None]
        self._slabs.append(weakref.ref(slab))
        return slab

    def _slabs_here(self) -> list[Slab]:
        return [slab for each in list(self._slabs) if (slab := each()) is not None]

    def _give_to_ring(self, slab: Slab, n_bytes: int) -> None:
        slab.has_ring = True
        self._ring = ByteRing(n_bytes)
        with aside():
            self._ring_place = slab.place(0, n_bytes)
        # Synchronization strategy: the allocator hands out what the current stream may still use,
        # for it orders that stream alone; the first copies to these bytes come from another.
        self._fences.add(0, n_bytes, self._link.mark(self._link.current()))

    def _passing(self) -> list[Page]:
        # At once: another thread may ask for a report.
        pages = list(self.pages.values())
        return [page for page in pages if not page.is_resident]

    def _let_go(self, slabs: list[Slab]) -> int:
        """Free slabs with all that is in them; how many bytes."""
        n_bytes = sum(slab.memory.nbytes for slab in slabs)
        if slabs:
            # Synchronization strategy: the allocator gives this memory to whoever asks next, and
            # knows of no use of it on the link's streams or the model's own side streams.
            self._link.finish()
        for page in self._residents.vacate(slabs):
            self.written_in_graphs += page.end_aliases()
        return n_bytes

    def _drop_last_needed(self, now: Pass) -> bool:
        """Give the place of the idle page back that is needed last; whether there was any."""
        idle = self.idle.free()
        if not idle:
            return False
        soon = now.soon()
        self.drop(max(idle.values(), key=lambda page: soon.get(page.unit, len(soon))))
        return True

    def _to_stay(self, unit: Unit) -> Found:
        """A page in a new slab, in the stead of others, as what passes leaves no room.

        A model whose layers keep views of their weights, as one does that fuses them at its first
        call, holds more at once than the plan could know.
        """
        n_bytes = whole_block_bytes(unit.n_bytes, self._link.device)
        missing_bytes = n_bytes - self._spare_bytes
        slabs = self._residents.to_give_back(missing_bytes, self._ring.capacity_bytes)
        if sum(slab.memory.nbytes for slab in slabs) >= missing_bytes:
            self._spare_bytes += self._let_go(slabs)
        elif self.lease.more(n_bytes):
            self._spare_bytes += n_bytes
        else:
            self._refuse(unit)
        # Which are to be free before as much is allocated.
        del slabs
        # Or they would stay reserved beside what is allocated now.
        self._link.release_cached()
        slab = self._allocate(n_bytes, RESIDENT)
        self._spare_bytes -= n_bytes
        # Synchronization strategy: as for the ring, see _give_to_ring.
        free = self._link.mark(self._link.current())
        place = slab.place(0, n_bytes)
        return Page(unit, place.memory, 0, place), [free]

    def _refuse(self, unit: Unit) -> NoReturn:
        """Raise for a unit that has no room: who holds the room, and the budget that would do."""
        ring_bytes, here_bytes = self._ring.capacity_bytes, self.resident_bytes
        leaving_bytes = memory_bytes(self._residents.leaving())
        needed_bytes = self._ring.used_bytes + here_bytes - leaving_bytes + unit.n_bytes
        all_bytes = ring_bytes + here_bytes + self._spare_bytes
        # There may be room, but in several places; and what holds weights, holds others next time
        needed_bytes = max(needed_bytes, all_bytes + max(unit.n_bytes, all_bytes // 4))
        budget_bytes = needed_bytes + self._beside_bytes
        others_bytes = self.lease.others_bytes
        others = f" beside {format_bytes(others_bytes)} of other models" if others_bytes else ""
        pages = [page for page in self.pages.values() if page.users or page.held()]
        told = [_told(page) for page in sorted(pages, key=lambda page: -page.unit.n_bytes)]
        is_held = any(page.held() for page in pages)
        advice = _ADVICE if is_held else "What runs needs all of these at once: "
        if is_held and torch.is_grad_enabled():
            advice = f"A graph of autograd holds weights: run under torch.no_grad(). {advice}"
        raise PagingError(
            f"{unit.name!r} ({format_bytes(unit.n_bytes)}) has no room on {self._link.device}: "
            f"{format_bytes(ring_bytes)} are there for passing units. In use: "
            f"{listed(told, _N_NAMED, '; ') or 'nothing'}. "
            f"{advice}allow a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes)"
            f"{others}.",
            budget_bytes,
        )


def n_bytes_of(pages: Iterable[Page]) -> int:
    """The bytes of the units of pages."""
    return sum(page.unit.n_bytes for page in pages)


def _told(page: Page) -> str:
    stays = ", which stays" if page.is_resident else ""
    held = page.held()
    names = listed([*map(repr, held)], _N_NAMED)
    why = f", for {names} or what shares its memory is held" if held else ""
    return f"{page.unit.name!r} ({format_bytes(page.unit.n_bytes)}{stays}){why}"
