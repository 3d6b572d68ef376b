"""A model cut in one of several ways: how each divides the device's memory, and in which slabs.

Invariant: a division is taken only if all of it, as the allocator rounds it, is within the budget.
Slabs are at most one step of segments each more than what is needed. What never leaves stands with
the ring, so that the other slabs can be given back whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from tenure._cuda_blocks import (
    LARGE_SEGMENT_BYTES,
    MIB,
    OWN_SEGMENT_BYTES,
    SEGMENT_STEP_BYTES,
    CachedMemory,
    is_rounding,
    taken_by,
    up_to,
    whole_block_bytes,
)
from tenure._errors import PagingError
from tenure._text import format_bytes

from .._device import Arrangement, SlabPlan
from .._model import UNIT_ALIGNMENT_BYTES, Cut, TensorTable, Unit, UnitSize, cut, sizes_with_own
from ._checks import Budget
from ._residency import LinkSpeed, Residency, divide, minimum_ring_bytes, n_bytes, smallest

_NEIGHBOURS = 4
_PARTS = (3, 8, 24)
"""Of a budget: what one unit may take of it. Which is best, a simulated pass of each tells."""
_MOST_SIZES = 6

_N_SLABS = (16, 8, 4, 2)
"""How many there are to be, about: the more there are, the less is given back for nothing."""
_LOSS = 1 / 100
"""The share of all bytes that rounding may cost for that."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A model cut in one way.

    Attributes:
        device: where it is paged to.
        table: its tensors.
        cut: its units.
        kept: those that must stay: what was asked for, and what no forward brackets, for it may be
            in use beside any other unit. A mask that the first layer gives out is, to the last.
    """

    device: torch.device
    table: TensorTable
    cut: Cut
    kept: frozenset[Unit]

    @classmethod
    def of(
        cls, model: nn.Module, device: torch.device, size: UnitSize, kept: list[nn.Module]
    ) -> Self:
        """Cut a model into units of a size."""
        table = TensorTable(model)
        merge_bytes = size.n_bytes or 0
        pieces = cut(model, table, size.fits(table), merge_bytes=merge_bytes, apart=kept)
        inside = table.extents_of(each for module in kept for each in module.modules())
        staying = frozenset(
            unit
            for unit in pieces.units
            if unit.is_loose or any(extent in inside for extent in unit.extents)
        )
        return cls(device, table, pieces, staying)

    @property
    def minimum_bytes(self) -> int:
        """The least budget for this cut."""
        return self.taken_by(self._least).allocated_bytes

    def arranged(self, division: Residency) -> Arrangement:
        """The slabs of a division."""
        return arrange(self.cut.units, division, self.kept, self.device)

    def taken_by(self, division: Residency) -> CachedMemory:
        """What a division takes of the device, with what can't be paged."""
        sizes = self.arranged(division).sizes + self.table.unpaged_sizes
        return taken_by(sizes, self.device)

    def divide(
        self, budget: Budget | None, link: LinkSpeed, compute_s: float | None
    ) -> Residency | None:
        """The best division of a budget; without one, what keeps the link busy."""
        if budget is None:
            return smallest(self.cut, self.kept, _NEIGHBOURS)
        room_bytes = budget.n_bytes - self.table.unpaged_bytes
        while True:
            found = divide(self.cut, self.kept, room_bytes, link, compute_s)
            if found is None:
                # A ring of the largest units alone may be within a budget in which no ring of
                # several is.
                least = self._least
                return None if self._excess_bytes(least, budget) else least
            excess_bytes = self._excess_bytes(found, budget)
            if not excess_bytes:
                return found
            # at whole steps, for between two of them all is rounded to the same
            is_in_steps = is_rounding(self.device) and room_bytes >= OWN_SEGMENT_BYTES
            step_bytes = SEGMENT_STEP_BYTES if is_in_steps else UNIT_ALIGNMENT_BYTES
            over_bytes = room_bytes % step_bytes
            room_bytes -= over_bytes or up_to(excess_bytes, step_bytes)

    @property
    def _least(self) -> Residency:
        return Residency(self.kept, minimum_ring_bytes(self.cut, self.kept))

    def _excess_bytes(self, division: Residency, budget: Budget) -> int:
        """By what a division exceeds a budget; 0 where it does not."""
        taken = self.taken_by(division)
        excess_bytes = taken.allocated_bytes - budget.n_bytes
        if budget.free_bytes is not None:
            excess_bytes = max(excess_bytes, taken.reserved_bytes - budget.free_bytes)
        return max(0, excess_bytes)


def unit_sizes(model: nn.Module, budget: Budget | None) -> list[UnitSize]:
    """How large units may be: large ones spare the latency of copies, small ones the ring."""
    weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
    if budget is None:
        return [UnitSize(min(64 * MIB, weight_bytes // 16))]
    # A mixture of experts that is cut below its layers leaves weights that no forward brackets, and
    # these would all have to stay: units as large as a layer need less.
    large = (UnitSize(n_bytes) for n_bytes in _some(sizes_with_own(model, TensorTable(model))))
    # What is free may be far more than the model, of which only a part may stay later.
    most_bytes = min(budget.n_bytes, weight_bytes) if budget.is_elastic else budget.n_bytes
    return [*(UnitSize(most_bytes // parts) for parts in _PARTS), *large, UnitSize(0)]


def too_small(model: nn.Module, draft: Draft, budget: Budget, minimum_bytes: int) -> PagingError:
    """The error of a budget that no cut fits in.

    Args:
        model: the model.
        draft: the cut that needs the least.
        budget: the budget.
        minimum_bytes: the least that would do.
    """
    stays_bytes = draft.table.unpaged_bytes + n_bytes(draft.kept)
    ring_bytes = minimum_ring_bytes(draft.cut, draft.kept)
    stays = f", beside {format_bytes(stays_bytes)} that stay" if stays_bytes else ""
    name = type(model).__name__
    if budget.free_bytes is not None and minimum_bytes <= budget.n_bytes:
        reserved_bytes = draft.taken_by(draft._least).reserved_bytes
        return PagingError(
            f"{name} can't be paged on {draft.device}, where {format_bytes(budget.free_bytes)} are "
            f"free: the least is {format_bytes(minimum_bytes)}, for which the allocator reserves "
            f"{format_bytes(reserved_bytes)}. Free memory of the device, or name a budget in "
            "bytes, if what is reserved already has room for it.",
            minimum_bytes,
        )
    return PagingError(
        f"{name} can't be paged within {format_bytes(budget.n_bytes)}: the "
        f"least is {format_bytes(minimum_bytes)} ({minimum_bytes} bytes), because "
        f"{format_bytes(ring_bytes)} of its weights are needed at once{stays}. "
        "Allow a larger budget.",
        minimum_bytes,
    )


def _some(sizes: set[int]) -> list[int]:
    """A few sizes that stand for all: each costs a plan."""
    every = -(-len(sizes) // _MOST_SIZES) or 1
    return sorted(sizes)[::-1][::every]


def arrange(
    units: Iterable[Unit], division: Residency, kept: Collection[Unit], device: torch.device
) -> Arrangement:
    """Arrange what a division has on a device.

    Args:
        units: all units of the model, in their order.
        division: which of them stay, and the least ring.
        kept: those that stay whatever happens.
        device: where.
    """
    resident = [unit for unit in units if unit in division.resident]
    ring_bytes = division.ring_bytes
    all_bytes = ring_bytes + n_bytes(resident)
    each_alone = (
        [[], *([unit] for unit in resident)] if ring_bytes else [[unit] for unit in resident]
    )
    alone = arrangement_of(ring_bytes, each_alone, device)
    together = arrangement_of(ring_bytes, [resident] if all_bytes else [], device)
    if not is_rounding(device):
        return alone
    if all_bytes < LARGE_SEGMENT_BYTES:
        # Small slabs share segments: many may be as good as one.
        return min(alone, together, key=lambda each: taken_by(each.sizes, device).reserved_bytes)
    finest_first = [
        arrangement_of(
            ring_bytes, _poured(ring_bytes, resident, kept, all_bytes // n_slabs), device
        )
        for n_slabs in _N_SLABS
    ]

    def lost_bytes(each: Arrangement) -> int:
        return sum(each.sizes) - all_bytes

    fine = [each for each in finest_first if lost_bytes(each) <= all_bytes * _LOSS]
    return fine[0] if fine else min([*finest_first, together], key=lost_bytes)


def _poured(
    ring_bytes: int, resident: Sequence[Unit], kept: Collection[Unit], least_bytes: int
) -> list[list[Unit]]:
    """Units in slabs of at least so many bytes, in their order; what never leaves in the first."""
    # What could not pass through the ring does not leave either
    leaving = [unit for unit in resident if unit not in kept and unit.n_bytes <= ring_bytes]
    fixed = [unit for unit in resident if unit not in set(leaving)]
    least_bytes = max(least_bytes, OWN_SEGMENT_BYTES)
    groups, in_last_bytes = [fixed], ring_bytes + n_bytes(fixed)
    for unit in leaving:
        if in_last_bytes >= (least_bytes if groups[1:] else OWN_SEGMENT_BYTES):
            groups.append([])
            in_last_bytes = 0
        groups[-1].append(unit)
        in_last_bytes += unit.n_bytes
    if groups[1:] and in_last_bytes < OWN_SEGMENT_BYTES:
        groups[-2:] = [[*groups[-2], *groups[-1]]]
    return groups


def arrangement_of(ring_bytes: int, groups: list[list[Unit]], device: torch.device) -> Arrangement:
    """Slabs for these units, behind the ring; what the first one has to spare is the ring's."""
    needed = [n_bytes(group) for group in groups]
    if ring_bytes:
        needed[0] += ring_bytes
    sizes = [whole_block_bytes(each, device) for each in needed]
    if ring_bytes:
        ring_bytes += sizes[0] - needed[0]
    slabs = (SlabPlan(tuple(group), size) for group, size in zip(groups, sizes, strict=True))
    return Arrangement(ring_bytes, tuple(slabs))
