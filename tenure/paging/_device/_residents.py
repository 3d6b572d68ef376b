"""The units that stay: where they stand, which of them could go, and the room that would make.

Invariant: nothing is chosen to go that a forward uses, that something holds, or that must stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from tenure._registries import NamedTensor

from .._model import Unit
from ._memory import Place, Slab
from ._page import RESIDENT, Page


class Residents:
    """Those among the pages on the device that stay.

    Args:
        pages: all pages on the device, those that pass among them.

    Attributes:
        kept: the units that stay whatever happens.
        vacant: places that wait for their units, each with the event that it is free after; they
            are filled when the units are next fetched.
    """

    def __init__(self, pages: dict[Unit, Page]) -> None:
        self._pages = pages
        self.kept: frozenset[Unit] = frozenset()
        self.vacant: dict[Unit, tuple[Place, object]] = {}

    @property
    def n_bytes(self) -> int:
        """What their places take: a unit may stand where a larger one stood."""
        return memory_bytes(self.pages()) + sum(place.n_bytes for place in self._empty_places())

    def pages(self) -> list[Page]:
        """All of them."""
        return [page for page in self._pages_now() if page.is_resident]

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The memory of each."""
        for page in self.pages():
            around = () if page.place is None else page.place.around
            inside = (*page.storages, *around)
            yield NamedTensor(page.memory, page.unit.name, RESIDENT, inside)
        for place in self._empty_places():
            yield NamedTensor(place.memory, "vacant", RESIDENT, place.around)

    def leaving(self) -> list[Page]:
        """Those that could pass from now on: nothing uses, holds or keeps them."""
        return [
            page
            for page in self.pages()
            if not page.users and page.unit not in self.kept and not page.is_held_by_any()
        ]

    def vacate(self, slabs: list[Slab]) -> list[Page]:
        """Let nothing stand in these slabs any more, nor be planned there; return what stood."""
        rows = self._rows()
        pages = [page for slab in slabs for page in rows[slab]]
        for page in pages:
            del self._pages[page.unit]
        gone = set(slabs)
        for unit, (place, _) in list(self.vacant.items()):
            if place.slab in gone:
                del self.vacant[unit]
        return pages

    def to_give_back(self, n_bytes: int, most_unit_bytes: int) -> list[Slab]:
        """Slabs of so many bytes together, or all, whose units could pass: the last, the smallest.

        Args:
            n_bytes: how many.
            most_unit_bytes: how large a unit can be that passes.
        """
        # A unit that is larger than the ring could never come back.
        leaving = {page for page in self.leaving() if page.unit.n_bytes <= most_unit_bytes}
        slabs = sorted(self._free_of_others(leaving), key=lambda slab: (-slab.rank, _n_bytes(slab)))
        return _first(slabs, n_bytes)

    def _pages_now(self) -> list[Page]:
        # At once: another thread may ask for a report.
        return list(self._pages.values())

    def _empty_places(self) -> list[Place]:
        return [place for place, _ in list(self.vacant.values())]

    def _free_of_others(self, leaving: set[Page]) -> list[Slab]:
        """The slabs in which nothing else is."""
        rows = self._rows().items()
        return [slab for slab, row in rows if not slab.has_ring and leaving.issuperset(row)]

    def _rows(self) -> dict[Slab, list[Page]]:
        """Return the pages that stand in each slab."""
        rows: dict[Slab, list[Page]] = {place.slab: [] for place in self._empty_places()}
        for page in self._pages_now():
            if page.place is not None:
                rows.setdefault(page.place.slab, []).append(page)
        return rows


def memory_bytes(pages: Iterable[Page]) -> int:
    """What the places of pages take."""
    return sum(page.memory.nbytes for page in pages)


def _first(slabs: list[Slab], n_bytes: int) -> list[Slab]:
    """As many of the slabs as take so many bytes together, or all."""
    before = accumulate(map(_n_bytes, slabs), initial=0)
    return [
        slab for slab, bytes_before in zip(slabs, before, strict=False) if bytes_before < n_bytes
    ]


def _n_bytes(slab: Slab) -> int:
    return slab.memory.nbytes
