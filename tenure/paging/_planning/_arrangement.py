"""In which slabs the ring and the units that stay stand, so that little is lost to rounding.

Invariant: what is allocated is at most one step of segments per slab more than what is needed. What
never leaves stands with the ring, so that the other slabs can be given back whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from tenure._cuda_blocks import (
    LARGE_SEGMENT_BYTES,
    OWN_SEGMENT_BYTES,
    is_rounding,
    taken_by,
    whole_block_bytes,
)

from .._device import Arrangement, SlabPlan
from .._model import Unit
from ._residency import Residency, n_bytes

_N_SLABS = (16, 8, 4, 2)
"""How many there are to be, about: the more there are, the less is given back for nothing."""
_LOSS = 1 / 100
"""The share of all bytes that rounding may cost for that."""


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
    alone = _arrangement(ring_bytes, each_alone, device)
    together = _arrangement(ring_bytes, [resident] if all_bytes else [], device)
    if not is_rounding(device):
        return alone
    if all_bytes < LARGE_SEGMENT_BYTES:
        # Small slabs share segments: many may be as good as one.
        return min(alone, together, key=lambda each: taken_by(each.sizes, device).reserved_bytes)
    finest_first = [
        _arrangement(ring_bytes, _poured(ring_bytes, resident, kept, all_bytes // n_slabs), device)
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


def _arrangement(ring_bytes: int, groups: list[list[Unit]], device: torch.device) -> Arrangement:
    """Slabs for these units, behind the ring; what the first one has to spare is the ring's."""
    needed = [n_bytes(group) for group in groups]
    if ring_bytes:
        needed[0] += ring_bytes
    sizes = [whole_block_bytes(each, device) for each in needed]
    if ring_bytes:
        ring_bytes += sizes[0] - needed[0]
    slabs = (SlabPlan(tuple(group), size) for group, size in zip(groups, sizes, strict=True))
    return Arrangement(ring_bytes, tuple(slabs))
