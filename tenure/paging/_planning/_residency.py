"""Which units stay on the device, and how large a ring the others pass through.

Invariant: what stays and the ring together never exceed the budget, and the ring holds whatever one
forward needs at once. Divisions are judged by simulated passes, which keep the engine's rules:
copies go one after another in the order of use, each as soon as the ring has room; a unit is
computed with when it is there, and then its place is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from .._device import ByteRing
from .._model import Cut, Unit

MOST_NEIGHBOURS = 6
_SMALL_SHARE = 1 / 64
"""A unit below this share of the largest one stays if it can: its copy is mostly latency."""

_RATIOS = (0.0, 0.25, 0.5, 0.95)
"""Computation by copy time of all weights, where the computation is not known."""
_ABOUT_AS_FAST = 1.02


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What copies to the device are assumed to take.

    Attributes:
        bytes_per_s: of a large copy.
        latency_s: added to each.
    """

    bytes_per_s: float
    latency_s: float = 30e-6


@dataclass(frozen=True, slots=True)
class Residency:
    """A division of the device's memory.

    Attributes:
        resident: the units that stay.
        ring_bytes: room for the others.
    """

    resident: frozenset[Unit]
    ring_bytes: int


def minimum_ring_bytes(cut: Cut, resident: frozenset[Unit]) -> int:
    """The most that one forward needs of units that pass."""
    each = [unit.n_bytes for unit in cut.units if unit not in resident]
    together = [n_bytes(set(needed) - resident) for needed in cut.needs.values()]
    return max(each + together, default=0)


def divide(
    cut: Cut, kept: frozenset[Unit], budget_bytes: int, link: LinkSpeed, compute_s: float | None
) -> Residency | None:
    """The division of a budget that makes a pass shortest; None if there is none.

    Args:
        cut: the units, in the order in which they are used.
        kept: those that must stay.
        budget_bytes: for all that stays and for the ring.
        link: the speed of copies.
        compute_s: seconds that a pass computes; where unknown, passes that wait for the link and
            passes that compute as long as they copy count alike.
    """
    candidates = [
        found
        for n_neighbours in range(MOST_NEIGHBOURS + 1)
        if (found := _candidate(cut, kept, budget_bytes, n_neighbours)) is not None
    ]
    if not candidates:
        return None
    return candidates[preferred([(expected_s(cut, c, link, compute_s), c) for c in candidates])]


def preferred(candidates: Sequence[tuple[float, Residency]]) -> int:
    """Which one has the largest ring of those that are about as fast as the fastest.

    Args:
        candidates: divisions, at least one, each with its expected seconds.
    """
    # A pass in reality has surprises that its plan has not, a cast or another order: a larger ring
    # bears more of them.
    best_s = min(expected for expected, _ in candidates)
    near = [i for i, (expected, _) in enumerate(candidates) if expected <= best_s * _ABOUT_AS_FAST]
    return max(near, key=lambda i: candidates[i][1].ring_bytes)


def smallest(cut: Cut, kept: frozenset[Unit], n_neighbours: int) -> Residency:
    """What keeps the link busy with little memory: small units stay, some neighbours pass."""
    resident = kept.union(_small(cut.units))
    return Residency(resident, neighbours_bytes(cut, resident, n_neighbours))


def predicted_pass_s(cut: Cut, division: Residency, link: LinkSpeed, compute_s: float) -> float:
    """Seconds of a pass in the steady state, its computation spread by bytes."""
    total_bytes = n_bytes(cut.units) or 1
    uses = [
        UnitUse(
            0 if unit in division.resident else unit.n_bytes,
            compute_s * unit.n_bytes / total_bytes,
        )
        for unit in cut.units
    ]
    return pass_s(uses, division.ring_bytes, link.bytes_per_s, link.latency_s)


def expected_s(cut: Cut, division: Residency, link: LinkSpeed, compute_s: float | None) -> float:
    """What a division is judged by; without a known computation, passes that differ in it."""
    if compute_s is not None:
        return predicted_pass_s(cut, division, link, compute_s)
    copy_s = n_bytes(cut.units) / link.bytes_per_s
    return sum(predicted_pass_s(cut, division, link, ratio * copy_s) for ratio in _RATIOS)


def _candidate(
    cut: Cut, kept: frozenset[Unit], budget_bytes: int, n_neighbours: int
) -> Residency | None:
    """Room for some neighbours in the ring, and as many units as the rest holds, evenly spread."""
    # All of it: no copies, no ring.
    if n_bytes(cut.units) <= budget_bytes:
        return Residency(frozenset(cut.units), 0)
    free_bytes = budget_bytes - n_bytes(kept)
    room_bytes = free_bytes - neighbours_bytes(cut, kept, n_neighbours)
    if room_bytes < 0:
        return None
    small_first = sorted(_small(cut.units), key=lambda unit: unit.n_bytes)
    small = _fitting((unit for unit in small_first if unit not in kept), room_bytes)
    rest = [unit for unit in cut.units if unit not in kept and unit not in small]
    resident = kept | small | _spread(rest, room_bytes - n_bytes(small))
    # No more than passes: what is left of the budget would never be used.
    passing_bytes = n_bytes(unit for unit in cut.units if unit not in resident)
    return Residency(resident, min(budget_bytes - n_bytes(resident), passing_bytes))


def neighbours_bytes(cut: Cut, resident: frozenset[Unit], n_neighbours: int) -> int:
    """The most bytes of so many units in a row, passes following each other."""
    passing = [unit.n_bytes for unit in cut.units if unit not in resident]
    n_neighbours = min(n_neighbours, len(passing))
    # The last units of a pass are neighbours of the first ones of the next, which is fetched ahead.
    around = passing + passing[: max(n_neighbours - 1, 0)]
    windows = [sum(around[i : i + n_neighbours]) for i in range(len(passing))]
    return max([minimum_ring_bytes(cut, resident), *windows])


def _small(units: Sequence[Unit]) -> list[Unit]:
    """What stays if it can, in the order of the units: a plan must not depend on addresses."""
    largest_bytes = max((unit.n_bytes for unit in units), default=0)
    most_bytes = largest_bytes * _SMALL_SHARE
    return [unit for unit in units if unit.n_bytes <= most_bytes]


def _fitting(units: Iterable[Unit], room_bytes: int) -> frozenset[Unit]:
    """Units in the order given, each that still fits."""
    chosen: list[Unit] = []
    for unit in units:
        if unit.n_bytes <= room_bytes:
            chosen.append(unit)
            room_bytes -= unit.n_bytes
    return frozenset(chosen)


def _spread(units: list[Unit], room_bytes: int) -> frozenset[Unit]:
    """Units that fill the room, at even distances in bytes; the link then never rests for long."""
    share = room_bytes / (n_bytes(units) or 1)
    chosen: set[Unit] = set()
    owed_bytes, left_bytes = 0.0, room_bytes
    for unit in units:
        owed_bytes += unit.n_bytes * share
        if owed_bytes >= unit.n_bytes / 2 and unit.n_bytes <= left_bytes:
            chosen.add(unit)
            owed_bytes -= unit.n_bytes
            left_bytes -= unit.n_bytes
    largest_first = sorted(units, key=lambda unit: -unit.n_bytes)
    rest = (unit for unit in largest_first if unit not in chosen)
    return frozenset(chosen) | _fitting(rest, left_bytes)


def n_bytes(units: Iterable[Unit]) -> int:
    """What units take on the device."""
    return sum(unit.n_bytes for unit in units)


@dataclass(frozen=True, slots=True)
class UnitUse:
    """The use of one unit.

    Attributes:
        n_bytes: what has to be copied for it; 0 for a resident unit.
        compute_s: how long the device computes with it.
    """

    n_bytes: int
    compute_s: float


@dataclass(slots=True)
class _Passing:
    start: int
    number: int
    copied_s: float


def pass_s(
    uses: Sequence[UnitUse], ring_bytes: int, link_bytes_per_s: float, copy_latency_s: float
) -> float:
    """Seconds of one pass of many, when each follows the one before; infinite if one can't run.

    Args:
        uses: what a pass uses, in order.
        ring_bytes: room for units that pass.
        link_bytes_per_s: speed of copies to the device.
        copy_latency_s: added to each copy.
    """
    # It would wait for ever.
    if any(use.n_bytes > ring_bytes for use in uses):
        return inf
    # The first finds the ring empty, and the second what the first has left there: what the third
    # takes is what all that follow take.
    n_passes = 3
    run = _Run(list(uses) * n_passes, ByteRing(ring_bytes), link_bytes_per_s, copy_latency_s)
    ends = [run.compute(number) for number in range(len(run.uses))]
    return ends[-1] - ends[-1 - len(uses)] if uses else 0.0


class _Run:
    def __init__(
        self, uses: list[UnitUse], ring: ByteRing, link_bytes_per_s: float, copy_latency_s: float
    ) -> None:
        self.uses = uses
        self._ring, self._bytes_per_s, self._latency_s = ring, link_bytes_per_s, copy_latency_s
        self._passing: deque[_Passing] = deque()
        self._next_copy = 0
        self._link_free_s = self._room_s = 0.0
        self._ends: list[float] = []

    def compute(self, number: int) -> float:
        """The end of a use, once all before it are known."""
        self._copy_ahead(number)
        ready_s = next((p.copied_s for p in self._passing if p.number == number), 0.0)
        begin_s = max(ready_s, self._ends[-1] if self._ends else 0.0)
        self._ends.append(begin_s + self.uses[number].compute_s)
        return self._ends[-1]

    def _copy_ahead(self, number: int) -> None:
        while self._next_copy < len(self.uses):
            n_bytes = self.uses[self._next_copy].n_bytes
            if n_bytes:
                start = self._place(n_bytes, number)
                if start is None:
                    return
                begin_s = max(self._link_free_s, self._room_s)
                self._link_free_s = begin_s + self._latency_s + n_bytes / self._bytes_per_s
                self._passing.append(_Passing(start, self._next_copy, self._link_free_s))
            self._next_copy += 1

    def _place(self, n_bytes: int, number: int) -> int | None:
        """Room for a copy while use ``number`` is about to run; earlier ones give theirs up."""
        while (start := self._ring.place(n_bytes)) is None:
            if not self._passing or self._passing[0].number >= number:
                return None
            # In the order of use, as the engine drops what is not needed soon.
            gone = self._passing.popleft()
            self._ring.free(gone.start)
            self._room_s = max(self._room_s, self._ends[gone.number])
        return start
