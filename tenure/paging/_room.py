"""Where pages are on the device, and which of them go when there is no room.

Invariant: all memory is allocated at the start; later, only as a budget that changes allows.
Nothing is chosen to go that a forward uses, that something holds, or that must stay. Who takes a
place learns of every event that its earlier use ends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from tenure._account import taken
from tenure._errors import PagingError
from tenure._heap import wait_for_readers
from tenure._registries import NamedTensor
from tenure._text import format_bytes, listed
from tenure._torch.quiet import aside

from ._link import Link
from ._memory import Arrangement, ByteRing, Fences, Place, SlabPlan, nowhere, place_in, places_in
from ._page import RESIDENT, IdlePages, Page
from ._pass import Pass
from ._tensors import HostTensor, Unit

RING = "paged: ring"
"""What reports of memory call the bytes that passing units share."""
_N_NAMED = 4
_ADVICE = (
    "What holds tensors beyond their use is a variable, a view or a container, in the code of the "
    "model or in yours: clone() what is kept, or "
)

Found = tuple[Page, list[object]]
"""A page yet to be filled, and the events that its place is in use until."""


class Lease:
    """What a budget allows a model, from pass to pass: here, what it was given at the start.

    It is asked when nothing of the model is under way that could not lose its place: as a pass
    begins, before a unit is used, and when a pass is over.
    """

    @property
    def others_bytes(self) -> int:
        """The bytes that other models of the budget hold."""
        return 0

    def begin(self) -> None:
        """Begin a pass: give memory back, or take some."""

    def look(self, *, goes_on: bool) -> None:
        """Give memory back if it is short, before a unit is used.

        Args:
            goes_on: whether it is the unit that was used last.
        """

    def end(self) -> None:
        """End the pass."""

    def gave_back(self) -> None:
        """Memory was given back to whoever had asked for it."""

    def close(self) -> None:
        """Close it, because the model is unpaged."""


class Room:
    """The ring of a model, and the slabs beside it.

    Args:
        link: the streams of the device.
        in_graphs: whether graphs of autograd hold weights.

    Attributes:
        pages: the units that are on the device.
        idle: those that pass and are not in use.
        expected: places beside the ring that wait for their units, each with the event that it is
            free after; they are filled when the units are next fetched.
        lease: what the budget allows from pass to pass.
        written: the last copy of each unit to the host, until one back, or the host, has waited
            for it.
        written_in_graphs: the weights of pages that are gone which the pass has written in place
            as part of a graph.
        moved: those that the pass has given other memory.
    """

    def __init__(self, link: Link, *, in_graphs: bool) -> None:
        self.pages: dict[Unit, Page] = {}
        self.written: dict[Unit, object] = {}
        self.idle = IdlePages()
        self.expected: dict[Unit, tuple[Place, object]] = {}
        self._link, self._in_graphs = link, in_graphs
        self._kept: frozenset[Unit] = frozenset()
        self._spare_bytes = 0
        self._ring = ByteRing(0)
        self._fences = Fences()
        self._ring_place = nowhere()
        self.lease = Lease()
        self.written_in_graphs: list[HostTensor] = []
        self.moved: list[HostTensor] = []
        # By number in the arrangement: the first one never leaves, and the last ones go first. The
        # plans are of all that there could be; none if what goes does not come back.
        self._slab_plans: dict[int, SlabPlan] = {}
        self._slabs: dict[int, Tensor] = {}

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
        """What the places beside the ring take: a unit may stand where a larger one stood."""
        return self.held_bytes - self.ring_bytes

    @property
    def staying_bytes(self) -> int:
        """The bytes of the units that stay."""
        return sum(page.unit.n_bytes for page, _ in self._residents())

    @property
    def slab_sizes(self) -> list[int]:
        """The bytes of each piece of the device's memory that units have."""
        return [slab.nbytes for slab in list(self._slabs.values())]

    @property
    def held_bytes(self) -> int:
        """All that it has of the device."""
        return sum(self.slab_sizes)

    @property
    def lasting_bytes(self) -> int:
        """What of that can't be given back whatever happens."""
        return self._slabs[0].nbytes if self._slabs else 0

    @property
    def most_bytes(self) -> int:
        """What it could have, if all units stayed."""
        return sum(plan.n_bytes for plan in self._slab_plans.values())

    @property
    def least_step_bytes(self) -> int:
        """The smallest slab that it could take; 0 where all are here."""
        return min((plan.n_bytes for plan in self._missing().values()), default=0)

    def reserve(
        self, arrangement: Arrangement, kept: frozenset[Unit], spare_bytes: int
    ) -> dict[Unit, Place]:
        """Allocate the ring, and memory for units that are to stay.

        Args:
            arrangement: where these are to stand.
            kept: units that stay whatever happens.
            spare_bytes: what else is in the budget, for who names one.
        """
        self._kept, self._spare_bytes = kept, spare_bytes
        reserved: dict[Unit, Place] = {}
        ring_bytes = arrangement.ring_bytes
        if arrangement.later is not None:
            self._slab_plans = dict(enumerate([*arrangement.slabs, *arrangement.later]))
        for rank, slab_plan in enumerate(arrangement.slabs):
            slab = self._allocate(rank, slab_plan.n_bytes, RING if ring_bytes else RESIDENT)
            if ring_bytes:
                self._ring = ByteRing(ring_bytes)
                with aside():
                    self._ring_place = place_in(slab, 0, ring_bytes)
                self._fences.add(0, ring_bytes, self.mark_new())
            with aside():
                reserved.update(places_in(slab, ring_bytes, slab_plan.units))
            ring_bytes = 0
        return reserved

    def mark_new(self) -> object:
        """Return the event after which memory that was just allocated may be written."""
        # Synchronization strategy: the allocator hands out what the current stream may still use,
        # for it orders that stream alone; the first copies to these bytes come from another.
        return self._link.mark(self._link.current())

    def take_back(self) -> None:
        """Release pages that an interruption left in use; no pass runs now."""
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

    def note_here(self, page: Page) -> None:
        """Note that a page is being filled: it is resident from now on."""
        self.pages[page.unit] = page
        self.expected.pop(page.unit, None)
        if not page.is_resident:
            self.idle.add(page)

    def free_page(self, unit: Unit) -> Found | None:
        """Return a page for a unit in the place that waits for it, or where the ring has room."""
        # It waits until the page is here: an interruption between would lose it.
        waiting = self.expected.get(unit)
        if waiting is not None:
            place, event = waiting
            return Page(unit, place.memory, 0, place), [event]
        start = self._ring.place(unit.n_bytes)
        if start is None:
            return None
        after = self._fences.take(start, start + unit.n_bytes)
        return Page(unit, self._ring_place.memory, start), after

    def at_once(self, unit: Unit, now: Pass) -> Found:
        """Return a page for a unit that is needed now, at the cost of those that are needed last.

        Raises:
            PagingError: what is in use leaves no room for it.
        """
        while (found := self.free_page(unit)) is None:
            # While another thread has a list of all objects, as at the end of a scope, every
            # weight has one more holder, so no page looks free.
            if not self._drop_last_needed(now) and not wait_for_readers():
                self._refuse(unit)
        return found

    def make_way(self, units: list[Unit], now: Pass) -> None:
        """Let go of what is in the way of several units, each of which would fit alone."""
        here = self.pages.keys() | self.expected.keys()
        needed = [unit.n_bytes for unit in units if unit not in here]
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
        for event in self.uses_of(page):
            self._fences.add(page.start, end, event)
        self._ring.free(page.start)

    def marks_of(self, page: Page) -> list[object]:
        """Events after all that was launched so far on the streams that have used a page."""
        streams = {**page.streams, **page.recorded_streams}
        return [self._link.mark(stream) for stream in streams.values()]

    def uses_of(self, page: Page) -> list[object]:
        """Return the events after which nothing reads or writes a page that was let go."""
        uses = self.marks_of(page) if page.last_use is None else page.last_use
        written = self.written.get(page.unit)
        return uses if written is None else [*uses, written]

    def give_back(self, n_bytes: int) -> int:
        """Let go of slabs of idle resident units, until so many bytes are free; they pass then.

        Returns:
            The bytes that were freed; 0 where in each slab one is in use or too large for the ring.
        """
        staying = {id(place.slab) for page, place in self._residents() if not self._may_pass(page)}
        given_bytes = 0
        for rank in sorted(self._slabs, reverse=True):
            if given_bytes >= n_bytes:
                break
            if rank and id(self._slabs[rank]) not in staying:
                if not given_bytes:
                    # Synchronization strategy: the allocator gives this memory to whoever asks
                    # next, and knows of no use of it on the link's streams or the model's own side
                    # streams.
                    self._link.finish()
                given_bytes += self._slabs[rank].nbytes
                self._let_go(self._slabs.pop(rank))
        return given_bytes

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
                slab = self._allocate(rank, plan.n_bytes, RESIDENT)
            except torch.OutOfMemoryError:
                break
            free = self.mark_new()
            with aside():
                places = list(places_in(slab, 0, plan.units))
            self.expected.update({unit: (place, free) for unit, place in places})
            taken_bytes += plan.n_bytes
        return taken_bytes

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the ring, and each unit that stays."""
        ring = self._ring_place
        if ring.memory.nbytes:
            passing = [storage for page in self._passing() for storage in page.storages]
            yield NamedTensor(ring.memory, "ring", RING, (*passing, *ring.around))
        for page, place in self._residents():
            inside = (*page.storages, *place.around)
            yield NamedTensor(page.memory, page.unit.name, RESIDENT, inside)
        for place, _ in list(self.expected.values()):
            yield NamedTensor(place.memory, "vacant", RESIDENT, place.around)

    def close(self) -> None:
        """Let go of the device's memory."""
        self.pages.clear()
        self.idle.clear()
        self.expected.clear()
        self._slabs.clear()
        self._ring_place = nowhere()

    def _missing(self) -> dict[int, SlabPlan]:
        """Return the slabs that could come, by their rank."""
        return {i: plan for i, plan in self._slab_plans.items() if i not in self._slabs}

    def _allocate(self, rank: int, n_bytes: int, what: str) -> Tensor:
        def make() -> Tensor:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self._link.device)

        with aside():
            slab = self._slabs[rank] = taken(make, what)
        return slab

    def _passing(self) -> list[Page]:
        # At once: another thread may ask for a report.
        pages = list(self.pages.values())
        return [page for page in pages if not page.is_resident]

    def _residents(self) -> list[tuple[Page, Place]]:
        pages = list(self.pages.values())
        return [(page, page.place) for page in pages if page.place is not None]

    def _may_pass(self, page: Page) -> bool:
        """Return whether a resident unit could leave now: nothing uses, holds or keeps it."""
        # A unit that is larger than the ring could never come back.
        fits = page.unit.n_bytes <= self.ring_bytes and page.unit not in self._kept
        return fits and not page.users and not page.is_held_by_any()

    def _let_go(self, slab: Tensor) -> None:
        """Let nothing stand in a slab any more, nor be planned there."""
        for page, place in self._residents():
            if place.slab is slab:
                del self.pages[page.unit]
                self.written_in_graphs += page.end_aliases()
        for unit, (place, _) in list(self.expected.items()):
            if place.slab is slab:
                del self.expected[unit]

    def _drop_last_needed(self, now: Pass) -> bool:
        """Give the place of the idle page back that is needed last; whether there was any."""
        idle = self.idle.free()
        if not idle:
            return False
        soon = now.soon()
        self.drop(max(idle.values(), key=lambda page: soon.get(page.unit, len(soon))))
        return True

    def _refuse(self, unit: Unit) -> NoReturn:
        """Raise for a unit that has no room: who holds the room, and the budget that would do."""
        # There may be room, but in several places; and what holds weights, holds others next time
        more_bytes = max(unit.n_bytes, self.held_bytes // 4)
        budget_bytes = self.held_bytes + more_bytes + self._spare_bytes
        others_bytes = self.lease.others_bytes
        others = f" beside {format_bytes(others_bytes)} of other models" if others_bytes else ""
        pages = [page for page in self.pages.values() if page.users or page.held()]
        told = [_told(page) for page in sorted(pages, key=lambda page: -page.unit.n_bytes)]
        is_held = any(page.held() for page in pages)
        advice = _ADVICE if is_held else "What runs needs all of these at once: "
        if is_held and self._in_graphs and torch.is_grad_enabled():
            advice = f"A graph of autograd holds weights: run under torch.no_grad(). {advice}"
        raise PagingError(
            f"{unit.name!r} ({format_bytes(unit.n_bytes)}) has no room on {self._link.device}: "
            f"{format_bytes(self.ring_bytes)} are there for passing units. In use: "
            f"{listed(told, _N_NAMED, '; ') or 'nothing'}. "
            f"{advice}allow a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes)"
            f"{others}.",
            budget_bytes,
        )


def _told(page: Page) -> str:
    stays = ", which stays" if page.is_resident else ""
    held = page.held()
    names = listed([*map(repr, held)], _N_NAMED)
    why = f", for {names} or what shares its memory is held" if held else ""
    return f"{page.unit.name!r} ({format_bytes(page.unit.n_bytes)}{stays}){why}"
