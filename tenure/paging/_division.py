"""How a model is cut into units and a budget divided: what stays, in which slabs, and the ring.

A unit goes to the device, and leaves it, in one piece. What several groups of modules use, a tied
embedding say, is a unit of its own that each of them needs.

Invariant: each extent of the table is in exactly one unit. All of it, as the allocator rounds it,
is within the budget; the ring holds whatever one forward needs at once; and whichever slabs are
there, the units that pass are spread evenly over the model. The first slab, with the ring and with
what must stay, is there from the start to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import isqrt

import torch
from torch import nn

from tenure._cuda_blocks import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    OWN_SEGMENT_BYTES,
    SEGMENT_STEP_BYTES,
    CachedBlocks,
    is_rounding,
    taken_by,
    whole_block_bytes,
)
from tenure._errors import PagingError
from tenure._text import format_bytes
from tenure._torch.compiler import is_compiled

from ._memory import Arrangement, SlabPlan
from ._tensors import TensorTable, Unit

# Their forward reads the weights of their children, all at once.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Their children are called one after the other, so that a unit of neighbours is used in one go.
_IN_ORDER = (nn.Sequential, nn.ModuleList)

Fits = Callable[[nn.Module], bool]
"""Whether a module is small enough to be a unit."""


@dataclass(frozen=True, slots=True)
class UnitSize:
    """How large a module may be to become a unit.

    Attributes:
        n_bytes: at most so many bytes, and small neighbours share a unit up to them.
        n_parameters: where the bytes are None: fewer parameters than these.
    """

    n_bytes: int | None = None
    n_parameters: int = 0

    def fits(self, table: TensorTable) -> Fits:
        """Return the rule, for the modules of a table."""
        most_bytes = self.n_bytes
        if most_bytes is None:
            return lambda module: sum(p.numel() for p in module.parameters()) < self.n_parameters
        return lambda module: n_bytes_in(table, module.modules()) <= most_bytes


@dataclass(eq=False, slots=True)
class Cut:
    """A model in units.

    Attributes:
        units: all of them, in the order in which the modules are registered.
        needs: for each module that leads units, those that its forward needs.
    """

    units: list[Unit]
    needs: dict[nn.Module, list[Unit]]


@dataclass(slots=True)
class _Group:
    """Modules whose tensors make a unit; the leaders are those whose forward brackets its use."""

    name: str
    modules: list[nn.Module]
    leaders: list[nn.Module]
    n_bytes: int


def cut(
    model: nn.Module,
    table: TensorTable,
    fits: Fits,
    *,
    merge_bytes: int = 0,
    apart: Collection[nn.Module] = (),
) -> Cut:
    """Cut a model from the top down: a module that fits is a unit, any other is cut further.

    Args:
        model: the model of the table.
        table: its tensors.
        fits: whether a module is small enough. A module without children is never cut.
        merge_bytes: neighbours in a Sequential or a ModuleList share a unit up to this size.
        apart: modules that share no unit with what is around them, and are never cut.
    """
    groups = list(_groups(model, "", table, fits, merge_bytes, apart, set()))
    extents = [table.extents_of(group.modules) for group in groups]
    uses = Counter(id(extent) for extent in chain.from_iterable(extents))
    # Used by a group that no forward brackets, a tensor may be read at any time.
    unled = (used for group, used in zip(groups, extents, strict=True) if not group.leaders)
    loose = {id(extent) for extent in chain.from_iterable(unled)}
    shared: dict[int, Unit] = {}
    units: list[Unit] = []
    needs: dict[nn.Module, list[Unit]] = {}
    for group, used in zip(groups, extents, strict=True):
        own = [extent for extent in used if uses[id(extent)] == 1]
        # What only this group uses. The rest, a tied embedding above all, would be copied for each
        # group that it is in if it were part of all of their units.
        needed = [Unit(group.name, own, not group.leaders)] if own else []
        for extent in used:
            if uses[id(extent)] > 1:
                if id(extent) not in shared:
                    name = extent.tensors[0].name
                    shared[id(extent)] = Unit(name, [extent], id(extent) in loose)
                needed.append(shared[id(extent)])
        units += [unit for unit in needed if unit not in units]
        for leader in group.leaders:
            needs.setdefault(leader, []).extend(needed)
    return Cut(units, needs)


def sizes_with_own(model: nn.Module, table: TensorTable) -> set[int]:
    """Return the sizes of modules that have tensors of their own beside their submodules.

    A layer of experts that holds their weights itself, beside a router, is one.
    """
    return {
        n_bytes_in(table, module.modules())
        for module in model.modules()
        if module is not model
        and not all(_is_whole(child, table) for child in (module, *module.children()))
    }


def _is_whole(module: nn.Module, table: TensorTable) -> bool:
    """Return whether a module's own tensors are used in its forward alone, or it has none."""
    is_called = type(module).forward is not nn.Module.forward
    return not table.direct[module] or (is_called and not any(module.children()))


def n_bytes_in(table: TensorTable, modules: Iterable[nn.Module]) -> int:
    """Return the bytes of the extents that modules use."""
    return sum(extent.n_bytes for extent in table.extents_of(modules))


def _groups(
    module: nn.Module,
    name: str,
    table: TensorTable,
    fits: Fits,
    merge_bytes: int,
    apart: Collection[nn.Module],
    done: set[nn.Module],
) -> Iterator[_Group]:
    """Yield the groups of a module; what is in ``done`` has been cut."""
    inside = [each for each in module.modules() if each not in done]
    size = n_bytes_in(table, inside)
    # Activations and dropout have nothing to page, and a module under a second name has been cut.
    if not size or _is_unit(module, inside, table, fits, apart):
        done.update(inside)
        if size:
            yield _Group(name or "model", inside, list(_leaders(module)), size)
        return
    # A class token or a table of positions beside the blocks, as of a vision transformer: its
    # forward lasts as long as the model's, and brackets nothing.
    done.add(module)
    if own_bytes := n_bytes_in(table, [module]):
        yield _Group(name or "model", [module], [], own_bytes)
    parts = [
        list(_groups(child, f"{name}.{key}".lstrip("."), table, fits, merge_bytes, apart, done))
        for key, child in module.named_children()
        if child not in done
    ]
    yield from _merged(parts, merge_bytes if isinstance(module, _IN_ORDER) else 0, apart)


def _is_unit(
    module: nn.Module,
    inside: list[nn.Module],
    table: TensorTable,
    fits: Fits,
    apart: Collection[nn.Module],
) -> bool:
    if module in apart or any(each in apart for each in inside):
        return module in apart
    # What is compiled gets all that it needs before it runs.
    if isinstance(module, _INDIVISIBLE) or is_compiled(module) or fits(module):
        return True
    # Cut further, it would only lose its forward as a bracket.
    return not any(table.direct[each] for each in inside if each is not module)


def _merged(
    parts: list[list[_Group]], merge_bytes: int, apart: Collection[nn.Module]
) -> list[_Group]:
    """Join neighbours that are one small group each, to units of even size."""
    total_bytes = sum(part[0].n_bytes for part in parts if len(part) == 1)
    # Even units need the smallest ring: six blocks, where four fit, are 3 and 3, not 4 and 2.
    n_units = -(-total_bytes // merge_bytes) if merge_bytes else 0
    most_bytes = -(-total_bytes // n_units) if n_units else 0
    groups: list[_Group] = []
    for part in parts:
        # A unit is loose or not as a whole; what is loose must stay.
        pair = [*groups[-1:], *part]
        is_pair = len(part) == 1 and len(pair) > 1 and all(each.leaders for each in pair)
        n_bytes = sum(each.n_bytes for each in pair)
        modules = [module for each in pair for module in each.modules]
        if is_pair and n_bytes <= most_bytes and not any(each in apart for each in modules):
            first, second = pair
            name = f"{first.name.partition(' to ')[0]} to {second.name}"
            groups[-1] = _Group(name, modules, first.leaders + second.leaders, n_bytes)
        else:
            groups += part
    return groups


def _leaders(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or, where it is never called itself, its children."""
    # The blocks of a model of transformers or diffusers stand in a ModuleList: hooks on that would
    # never be called.
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from _leaders(child)


@dataclass(frozen=True, slots=True)
class Budget:
    """What weights may take.

    Attributes:
        n_bytes: allocated.
        free_bytes: reserved, where the budget is a share of what is free; else the user's affair.
        now_bytes: what there is at first, where the budget changes, and all of it may be had only
            later; None where it does not change.
    """

    n_bytes: int
    free_bytes: int | None = None
    now_bytes: int | None = None


_RUN = 4
"""Without a budget, the ring has room for so many units in a row."""
_MOST_UNIT = 1 / 16
"""Of the weights: what one unit may take."""
_SMALL_SHARE = 1 / 64
"""A unit below this share of the largest one stays if it can: its copy is mostly latency."""
_ABOUT_AS_LARGE = 3 / 4

_N_SLABS = (16, 8, 4, 2)
"""How many there are to be, about: the more there are, the less is given back for nothing."""
_LOSS = 1 / 100
"""The share of all bytes that rounding may cost for that."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The assumed time of copies to the device.

    Attributes:
        bytes_per_s: of a large copy.
        latency_s: added to each.
    """

    bytes_per_s: float
    latency_s: float = 30e-6


class Draft:
    """A model cut in one way.

    Args:
        model: the model.
        device: where it is paged to.
        size: of its units.
        kept: the modules that must stay.

    Attributes:
        device: as above.
        table: its tensors.
        cut: its units.
        kept: the units that must stay: what was asked for, and what no forward brackets, for it may
            be in use beside any other unit. A mask that the first layer gives out is, to the last.
        others: the other units, in the order in which they come to stay.
        whole_rings: for each unit the ring in which its copy is hidden behind computation.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, size: UnitSize, kept: list[nn.Module]
    ) -> None:
        table = self.table = TensorTable(model)
        self.device = device
        self.cut = cut(model, table, size.fits(table), merge_bytes=size.n_bytes or 0, apart=kept)
        inside = table.extents_of(each for module in kept for each in module.modules())
        self.kept = frozenset(
            unit
            for unit in self.cut.units
            if unit.is_loose or any(extent in inside for extent in unit.extents)
        )
        others = [unit for unit in self.cut.units if unit not in self.kept]
        rings = _whole_rings([unit.n_bytes for unit in others])
        self.others, self.whole_rings = _spread(others), dict(zip(others, rings, strict=True))

    @property
    def least_ring_bytes(self) -> int:
        """The most that one forward needs of units that may pass."""
        each = [unit.n_bytes for unit in self.others]
        together = [n_bytes(set(needed) - self.kept) for needed in self.cut.needs.values()]
        return max(each + together, default=0)

    @property
    def least(self) -> CachedBlocks:
        """The memory of the least budget for this cut."""
        return taken_by(self._arranged(self.least_ring_bytes, []).sizes, self.device)

    def stalled_bytes(self, ring_bytes: int, units: Iterable[Unit]) -> int:
        """Return the bytes of units whose copies are not hidden behind computation."""
        return n_bytes(unit for unit in units if self.whole_rings[unit] > ring_bytes)

    def divide(self, budget: Budget | None) -> Arrangement | None:
        """Divide a budget; without one, take what keeps the link busy. None if it is too small."""
        if budget is None:
            return self._without_budget()
        room_bytes = budget.n_bytes
        while True:
            # At whole steps, for between two of them all is rounded to the same.
            if is_rounding(self.device):
                is_in_steps = room_bytes >= OWN_SEGMENT_BYTES
                room_bytes -= room_bytes % (SEGMENT_STEP_BYTES if is_in_steps else BLOCK_BYTES)
            ring_bytes = self._ring_bytes(room_bytes - n_bytes(self.kept))
            if ring_bytes is None:
                return None
            if budget.now_bytes is None:
                found = self._filled(ring_bytes, room_bytes)
            else:
                found = self._elastic(ring_bytes, budget.now_bytes)
            taken = taken_by(found.sizes, self.device)
            excess_bytes = taken.allocated_bytes - budget.n_bytes
            if budget.free_bytes is not None:
                excess_bytes = max(excess_bytes, taken.reserved_bytes - budget.free_bytes)
            if excess_bytes <= 0:
                return found
            room_bytes -= excess_bytes

    def _ring_bytes(self, room_bytes: int) -> int | None:
        """Return the bytes of the best ring: a long one takes residents, a short one stalls."""
        least_bytes = self.least_ring_bytes
        sizes = {max(least_bytes, ring_bytes) for ring_bytes in self.whole_rings.values()}
        possible = [n for n in sizes | {least_bytes} if n <= room_bytes]
        # A copy that is not hidden waits for about half of its time: nobody knows the computation.
        return min(
            possible, key=lambda n: (n + self.stalled_bytes(n, self.others) / 2, n), default=None
        )

    def _filled(self, ring_bytes: int, room_bytes: int) -> Arrangement:
        """Return a ring of at least these bytes, and the units that have room beside it."""
        left_bytes = room_bytes - n_bytes(self.kept)
        # All of it: no copies, no ring.
        if n_bytes(self.others) <= left_bytes:
            return self._arranged(0, self.others)
        left_bytes -= ring_bytes
        staying = []
        for unit in self.others:
            if unit.n_bytes <= left_bytes:
                staying.append(unit)
                left_bytes -= unit.n_bytes
        # No more than passes: the rest would never be used.
        passing_bytes = n_bytes(self.others) - n_bytes(staying)
        return self._arranged(min(ring_bytes + left_bytes, passing_bytes), staying)

    def _elastic(self, ring_bytes: int, now_bytes: int) -> Arrangement:
        """Return all slabs, those that exist now, and the least number."""
        whole = self._arranged(ring_bytes, self.others, is_elastic=True)
        ends = accumulate(whole.sizes)
        n_there = max(1, sum(end <= now_bytes for end in ends))
        return Arrangement(whole.ring_bytes, whole.slabs[:n_there], whole.slabs[n_there:])

    def _without_budget(self) -> Arrangement:
        small, passing = _by_size([*self.whole_rings])
        sizes = [unit.n_bytes for unit in passing]
        last = range(min(_RUN, len(sizes)))
        runs = [sum(sizes[i - n] for n in last) for i in range(len(sizes))]
        return self._arranged(max([self.least_ring_bytes, *runs]), small)

    def _arranged(
        self, ring_bytes: int, staying: Sequence[Unit], *, is_elastic: bool = False
    ) -> Arrangement:
        kept = [unit for unit in self.cut.units if unit in self.kept]
        return arrange(ring_bytes, kept, staying, self.device, is_elastic=is_elastic)


def unit_sizes(model: nn.Module, budget: Budget | None, link: LinkSpeed) -> list[UnitSize]:
    """Return the sizes that units may have: the best, then smaller ones for small budgets."""
    table = TensorTable(model)
    weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
    # Large units spare latency, and small ones the ring of two of them: both cost the same here.
    latency_bytes = int(link.latency_s * link.bytes_per_s)
    best_bytes = min(isqrt(weight_bytes * latency_bytes // 2), int(weight_bytes * _MOST_UNIT))
    if budget is None:
        return [UnitSize(best_bytes)]
    # A mixture of experts that is cut below its layers leaves weights that no forward brackets, and
    # these would all have to stay: units as large as a layer need less.
    own_sizes = sorted(sizes_with_own(model, table), reverse=True)
    return [UnitSize(n) for n in (best_bytes, *own_sizes, 0)]


def too_small(model: nn.Module, draft: Draft, budget: Budget) -> PagingError:
    """Return the error of a budget that no cut fits in.

    Args:
        model: the model.
        draft: the cut that needs the least.
        budget: the budget.
    """
    stays_bytes = n_bytes(draft.kept)
    stays = f", beside {format_bytes(stays_bytes)} that stay" if stays_bytes else ""
    name, least = type(model).__name__, draft.least
    minimum_bytes = least.allocated_bytes
    if budget.free_bytes is not None and minimum_bytes <= budget.n_bytes:
        return PagingError(
            f"{name} can't be paged on {draft.device}, where {format_bytes(budget.free_bytes)} are "
            f"free: the least is {format_bytes(minimum_bytes)}, for which the allocator reserves "
            f"{format_bytes(least.reserved_bytes)}. Free memory of the device, or name a budget in "
            "bytes, if what is reserved already has room for it.",
            minimum_bytes,
        )
    return PagingError(
        f"{name} can't be paged within {format_bytes(budget.n_bytes)}: the "
        f"least is {format_bytes(minimum_bytes)} ({minimum_bytes} bytes), because "
        f"{format_bytes(draft.least_ring_bytes)} of its weights are needed at once{stays}. "
        "Allow a larger budget.",
        minimum_bytes,
    )


def arrange(
    ring_bytes: int,
    kept: Sequence[Unit],
    others: Sequence[Unit],
    device: torch.device,
    *,
    is_elastic: bool = False,
) -> Arrangement:
    """Arrange in slabs the units that stay.

    Args:
        ring_bytes: the least ring; it gets what the first slab has to spare.
        kept: the units that stay whatever happens.
        others: those that may pass later, the first ones last.
        device: where.
        is_elastic: whether slabs come and go.
    """
    all_bytes = ring_bytes + n_bytes(kept) + n_bytes(others)
    is_large = all_bytes >= LARGE_SEGMENT_BYTES
    # Each unit in a slab of its own; but rounding costs for each slab. Small slabs share segments:
    # many may be as good as one.
    finest_first = [0]
    if is_rounding(device) and is_large:
        finest_first = [max(all_bytes // n, OWN_SEGMENT_BYTES) for n in _N_SLABS]
    elif is_rounding(device) and not is_elastic:
        finest_first = [0, all_bytes]
    found = []
    for least_bytes in finest_first:
        first_bytes = 0 if is_elastic else min(least_bytes, OWN_SEGMENT_BYTES)
        found.append(_slabs(ring_bytes, kept, others, first_bytes, least_bytes, device))
    reserved = [taken_by(each.sizes, device).reserved_bytes for each in found]
    most_bytes = min(reserved) + all_bytes * _LOSS
    return next(e for e, n in zip(found, reserved, strict=True) if n <= most_bytes)


def _slabs(
    ring_bytes: int,
    kept: Sequence[Unit],
    others: Sequence[Unit],
    first_bytes: int,
    least_bytes: int,
    device: torch.device,
) -> Arrangement:
    """Return slabs of at least so many bytes; what never leaves is behind the ring, in the first.

    Of at least 0 bytes, each unit has a slab of its own. The ring gets what its slab spares.
    """
    fixed = [*kept]
    if least_bytes:
        # What could not pass through the ring does not leave either.
        fixed += [unit for unit in others if unit.n_bytes > ring_bytes]
    groups, sizes, enough_bytes = [fixed], [ring_bytes + n_bytes(fixed)], first_bytes
    for unit in others:
        if not least_bytes or unit.n_bytes <= ring_bytes:
            if sizes[-1] >= enough_bytes:
                groups.append([])
                sizes.append(0)
                enough_bytes = least_bytes
            groups[-1].append(unit)
            sizes[-1] += unit.n_bytes
    if groups[1:] and sizes[-1] < min(least_bytes, OWN_SEGMENT_BYTES):
        groups[-2:], sizes[-2:] = [[*groups[-2], *groups[-1]]], [sum(sizes[-2:])]
    whole = [whole_block_bytes(size, device) for size in sizes]
    if ring_bytes:
        ring_bytes += whole[0] - sizes[0]
    slabs = [SlabPlan(tuple(g), n) for g, n in zip(groups, whole, strict=True) if n]
    return Arrangement(ring_bytes, tuple(slabs))


def _spread(units: list[Unit]) -> list[Unit]:
    """Small ones first; then an order of which each beginning is spread evenly over the model."""
    small, rest = _by_size(units)
    width = len(rest).bit_length()
    # The lowest bit counts most: all even numbers come first, and of these every other one.
    order = sorted(range(len(rest)), key=lambda i: f"{i:0{width}b}"[::-1])
    return [*small, *(rest[i] for i in order)]


def _by_size(units: list[Unit]) -> tuple[list[Unit], list[Unit]]:
    """Units that stay if they can, and the rest."""
    most_bytes = max((unit.n_bytes for unit in units), default=0) * _SMALL_SHARE
    small = [unit for unit in units if unit.n_bytes <= most_bytes]
    return small, [unit for unit in units if unit.n_bytes > most_bytes]


def _whole_rings(sizes: list[int]) -> Iterator[int]:
    """For each unit in a row of passes, its bytes and those before it that hide its copy."""
    for i, size in enumerate(sizes):
        before_bytes, n_before = 0, 0
        # As long as the one before computes this one is copied; a large one needs several.
        while before_bytes < size * _ABOUT_AS_LARGE and n_before < len(sizes) - 1:
            n_before += 1
            before_bytes += sizes[i - n_before]
        # Several do not lie side by side in the ring as soon as the last use of one is over.
        more_bytes = sizes[i - n_before - 1] if 1 < n_before < len(sizes) - 1 else 0
        yield size + before_bytes + more_bytes


def n_bytes(units: Iterable[Unit]) -> int:
    """Return the bytes of units on the device."""
    return sum(unit.n_bytes for unit in units)
