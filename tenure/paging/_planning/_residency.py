"""Which units stay on the device, and how large a ring the others pass through.

Invariant: what stays and the ring together never exceed the budget, and the ring holds whatever one
forward needs at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from .._model import Cut, Unit
from ._simulated_pass import UnitUse, pass_s

_MOST_NEIGHBOURS = 6
_SMALL_SHARE = 1 / 64
"""A unit below this share of the largest one stays if it can: its copy is mostly latency."""

_RATIOS = (0.0, 0.25, 0.5, 0.95)
"""Computation by copy time of all weights, where the computation is not known."""
_ABOUT_AS_FAST = 1.02


class _HasRing(Protocol):
    @property
    def ring_bytes(self) -> int: ...


_Division = TypeVar("_Division", bound=_HasRing)


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
        for n_neighbours in range(_MOST_NEIGHBOURS + 1)
        if (found := _candidate(cut, kept, budget_bytes, n_neighbours)) is not None
    ]
    return preferred([(expected_s(cut, each, link, compute_s), each) for each in candidates])


def preferred(candidates: Sequence[tuple[float, _Division]]) -> _Division | None:
    """Of what is about as fast as the fastest, what has the largest ring: it bears more surprises.

    Args:
        candidates: divisions, or what has one, each with its expected seconds.
    """
    if not candidates:
        return None
    # A pass in reality has surprises that its plan has not: a cast, another order.
    best_s = min(expected for expected, _ in candidates)
    near = [each for expected, each in candidates if expected <= best_s * _ABOUT_AS_FAST]
    return max(near, key=lambda each: each.ring_bytes)


def smallest(cut: Cut, kept: frozenset[Unit], n_neighbours: int) -> Residency:
    """What keeps the link busy with little memory: small units stay, some neighbours pass."""
    resident = kept.union(_small(cut.units))
    return Residency(resident, _ring_bytes(cut, resident, n_neighbours))


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
    room_bytes = free_bytes - _ring_bytes(cut, kept, n_neighbours)
    if room_bytes < 0:
        return None
    small_first = sorted(_small(cut.units), key=lambda unit: unit.n_bytes)
    small = _fitting((unit for unit in small_first if unit not in kept), room_bytes)
    rest = [unit for unit in cut.units if unit not in kept and unit not in small]
    resident = kept | small | _spread(rest, room_bytes - n_bytes(small))
    # No more than passes: what is left of the budget would never be used.
    passing_bytes = n_bytes(unit for unit in cut.units if unit not in resident)
    return Residency(resident, min(budget_bytes - n_bytes(resident), passing_bytes))


def _ring_bytes(cut: Cut, resident: frozenset[Unit], n_neighbours: int) -> int:
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
