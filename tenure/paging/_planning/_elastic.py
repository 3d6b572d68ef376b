"""Plans for a budget that changes: a ring that is always there, and slabs that come and go.

Invariant: whichever slabs are there, what passes is spread evenly over the model, and all of it
fits through the ring, one forward's needs at a time. The first slab, with the ring and with what
must stay, is there from the start to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from tenure._cuda_blocks import LARGE_SEGMENT_BYTES, OWN_SEGMENT_BYTES, is_rounding, taken_by

from .._device import Arrangement
from .._model import Unit
from ._checks import Budget
from ._draft import Draft, arrangement_of
from ._residency import (
    MOST_NEIGHBOURS,
    LinkSpeed,
    Residency,
    expected_s,
    n_bytes,
    neighbours_bytes,
)

_Item = TypeVar("_Item")
_N_SLABS = (24, 16, 12, 8, 6, 4, 3, 2)
"""How many there are to be: the more there are, the closer the budget is followed."""


def elastic(
    drafts: Sequence[Draft], budget: Budget | None, link: LinkSpeed, compute_s: float | None
) -> tuple[Draft, Residency, Arrangement] | None:
    """The best of some drafts for a budget that changes; None if nothing fits in it.

    Args:
        drafts: the model, cut in several ways.
        budget: what there is.
        link: the speed of copies.
        compute_s: seconds that a pass computes, if known.
    """
    assert budget is not None
    # With room for two units one is copied while the other computes, which no plan does without
    # unless it must: what it gains elsewhere depends on a link that nobody has measured yet.
    found = _tried(drafts, range(2, MOST_NEIGHBOURS + 1), budget.n_bytes)
    found = found or _tried(drafts, range(1), budget.n_bytes)
    if not found:
        return None
    prices = [_price(draft, whole, budget, link, compute_s) for draft, whole in found]
    draft, whole = found[prices.index(min(prices))]
    # At the least the first one, for which others have to make way.
    n_there = max(1, _n_within(draft, whole, budget.now_bytes or 0))
    there = Arrangement(whole.ring_bytes, whole.slabs[:n_there], whole.slabs[n_there:])
    return draft, _division(whole, n_there), there


def least_bytes(draft: Draft) -> int:
    """The least budget of a draft."""
    ring_bytes = neighbours_bytes(draft.cut, draft.kept, 0)
    first = _slabs(draft, ring_bytes).slabs[:1]
    sizes = [slab.n_bytes for slab in first]
    return taken_by([*sizes, *draft.table.unpaged_sizes], draft.device).allocated_bytes


def _tried(
    drafts: Sequence[Draft], neighbours: range, budget_bytes: int
) -> list[tuple[Draft, Arrangement]]:
    """Drafts with rings for so many units in a row, where at least the ring fits."""
    slabs = (
        (draft, _slabs(draft, neighbours_bytes(draft.cut, draft.kept, n_neighbours)))
        for draft in drafts
        for n_neighbours in neighbours
    )
    return [(draft, whole) for draft, whole in slabs if _n_within(draft, whole, budget_bytes)]


def _price(
    draft: Draft, whole: Arrangement, budget: Budget, link: LinkSpeed, compute_s: float | None
) -> float:
    """What a draft is judged by: passes with half of the weights there, or as much as there is.

    A ring is never given back, so that its bytes are missed elsewhere.
    """
    weight_bytes = n_bytes(draft.cut.units) or 1
    half_bytes = min(budget.n_bytes, weight_bytes // 2)
    division = _division(whole, max(1, _n_within(draft, whole, half_bytes)))
    seconds = expected_s(draft.cut, division, link, compute_s)
    return seconds * (1 + whole.ring_bytes / weight_bytes)


def _division(whole: Arrangement, n_slabs: int) -> Residency:
    there = frozenset(unit for slab in whole.slabs[:n_slabs] for unit in slab.units)
    return Residency(there, whole.ring_bytes)


def _n_within(draft: Draft, whole: Arrangement, budget_bytes: int) -> int:
    """How many of the slabs are within a budget."""
    beside_bytes = taken_by(draft.table.unpaged_sizes, draft.device).allocated_bytes
    ends = accumulate(whole.sizes, initial=beside_bytes)
    return sum(end <= budget_bytes for end in list(ends)[1:])


def _slabs(draft: Draft, ring_bytes: int) -> Arrangement:
    """All slabs, in the order in which they come; they go in the opposite one."""
    fixed = [unit for unit in draft.cut.units if unit in draft.kept]
    rest = [unit for unit in draft.cut.units if unit not in draft.kept]
    is_small = n_bytes(draft.cut.units) < LARGE_SEGMENT_BYTES
    if is_small or not is_rounding(draft.device):
        return arrangement_of(ring_bytes, [fixed, *([u] for u in _spread(rest))], draft.device)
    found = [
        arrangement_of(ring_bytes, [fixed, *groups], draft.device)
        for n_slabs in _N_SLABS
        if (groups := _groups(rest, n_slabs)) is not None
    ]
    if not found:
        return arrangement_of(ring_bytes, [fixed, rest] if rest else [fixed], draft.device)
    all_bytes = ring_bytes + n_bytes(draft.cut.units)

    def lost_share(each: Arrangement) -> float:
        # What rounding takes, and the half of a slab that a budget on average leaves over.
        return (sum(each.sizes) - all_bytes) / all_bytes + 1 / (2 * len(each.slabs))

    return min(found, key=lost_share)


def _groups(units: Sequence[Unit], n_slabs: int) -> list[list[Unit]] | None:
    """The units in so many slabs, those of each spread evenly; None if these would be small."""
    groups = [list(units[i::n_slabs]) for i in range(min(n_slabs, len(units)))]
    if any(n_bytes(group) < OWN_SEGMENT_BYTES for group in groups):
        return None
    return list(_spread(groups))


def _spread(items: Sequence[_Item]) -> Iterator[_Item]:
    """In an order of which each beginning is spread evenly over them."""
    width = max(1, (len(items) - 1).bit_length())

    def mirrored(number: int) -> int:
        return int(f"{number:0{width}b}"[::-1], 2)

    return (items[i] for i in sorted(range(len(items)), key=mirrored))
