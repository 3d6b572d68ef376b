"""The plan of a paged model: what stays, what passes, and how near to the limit that can run.

Invariant: a plan is made from the model's sizes alone. Nothing is allocated, moved or run for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn

from tenure._errors import PagingError
from tenure._units import format_bytes

from ._checks import (
    Elsewhere,
    check_host,
    check_seconds_and_speed,
    checked_budget,
    checked_device,
    checked_kept,
    checked_layer_size,
    checked_model,
)
from ._residency import (
    LinkSpeed,
    Residency,
    divide,
    expected_s,
    minimum_ring_bytes,
    n_bytes,
    predicted_pass_s,
    preferred,
    smallest,
)
from ._table import TensorTable
from ._units import Cut, Unit, UnitSize, cut, sizes_with_own

_MIB = 2**20
_NEIGHBOURS = 4
_PARTS = (3, 8, 24)
"""Of a budget: what one unit may take of it. Which is best, a simulated pass of each tells."""
_MOST_SIZES = 6
PCIE_4 = LinkSpeed(bytes_per_s=24e9)
"""What a plan assumes where nothing was measured: PCIe 4.0 with 16 lanes."""
DISK = LinkSpeed(bytes_per_s=2e9, latency_s=100e-6)
"""What it assumes of a disk, as most with flash memory reach."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """Part of a model that is moved in one piece.

    Attributes:
        name: of its modules or its tensor.
        n_bytes: its bytes on the device.
        resident: whether it stays there.
    """

    name: str
    n_bytes: int
    resident: bool


@dataclass(frozen=True, slots=True)
class PagingPlan:
    """How a model is paged; printable before anything runs.

    Attributes:
        model: the name of its class.
        device: where it is paged to.
        units: its parts, in the order of registration.
        weight_bytes: all units together, and the tensors that can't be paged.
        resident_bytes: what stays on the device, those tensors included.
        ring_bytes: the room that the others pass through.
        device_bytes: both: what paging takes of the device, until it gives some back.
        budget_bytes: what it was allowed to take.
        minimum_bytes: the least budget that would do.
        link_bytes_per_s: the assumed speed of copies.
        limit_s: the least time of a pass: ``max((W-R)/BW, C)``.
        predicted_s: the time of a pass in the steady state by this plan.
        computes_on_host: whether what does not stay is computed on the host, by ``chunk``.
    """

    model: str
    device: str
    units: tuple[PlannedUnit, ...]
    weight_bytes: int
    resident_bytes: int
    ring_bytes: int
    device_bytes: int
    budget_bytes: int
    minimum_bytes: int
    link_bytes_per_s: float
    limit_s: float
    predicted_s: float
    computes_on_host: bool = False

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        passing = [unit for unit in self.units if not unit.resident]
        n_resident = len(self.units) - len(passing)
        passing_bytes = sum(unit.n_bytes for unit in passing)
        weights = _in_units(self.weight_bytes, len(self.units))
        return [
            f"{self.model} on {self.device}: {weights}, within {format_bytes(self.budget_bytes)} "
            f"(at least {format_bytes(self.minimum_bytes)})",
            f"  stays   {_in_units(self.resident_bytes, n_resident)}",
            *self._rest(_in_units(passing_bytes, len(passing))),
            *self._unit_lines(),
        ]

    def _rest(self, passing: str) -> list[str]:
        if self.computes_on_host:
            return [f"  host    {passing}, computed there"]
        return [
            f"  passes  {passing}, through a ring of {format_bytes(self.ring_bytes)}",
            f"  a pass  takes {self.limit_s * 1e3:.3f} ms at the least, and "
            f"{self.predicted_s * 1e3:.3f} ms by this plan, at "
            f"{self.link_bytes_per_s / 1e9:.1f} GB/s",
        ]

    def _unit_lines(self) -> Iterator[str]:
        width = max((len(unit.name) for unit in self.units), default=0)
        elsewhere = "host" if self.computes_on_host else "passes"
        for unit in self.units:
            place = "stays" if unit.resident else elsewhere
            yield f"    {unit.name:{width}}  {format_bytes(unit.n_bytes):>10}  {place}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what carrying it out needs.

    Attributes:
        plan: for the user.
        table: the model's tensors.
        cut: its units.
        division: of the device's memory.
        kept: the units that stay, whatever happens.
    """

    plan: PagingPlan
    table: TensorTable
    cut: Cut
    division: Residency
    kept: frozenset[Unit]


def plan_paging(
    model: nn.Module,
    device: str | torch.device = "cuda",
    max_layer_size: int | str = -1,
    *,
    budget: int | str | None = None,
    host: str | Path = "pinned",
    keep: Iterable[str] = (),
    link_bytes_per_s: float | None = None,
    compute_s: float | None = None,
) -> PagingPlan:
    """Say how ``page`` would divide the device, without doing it.

    Args:
        model: a model in host memory, or on ``meta``.
        device: the accelerator; ``"cpu"`` where the host is a folder.
        max_layer_size: as of ``page``.
        budget: as of ``page``.
        host: as of ``page``; for ``load_paged``, the path of the weights. Nothing is read or made.
        keep: as of ``page``.
        link_bytes_per_s: the speed of copies to the device; by default that of PCIe 4.0, or, where
            the host is a path, 2 GB/s.
        compute_s: seconds that a pass computes, if known.

    Returns:
        The plan: printable, and with its bytes and times as attributes.

    Raises:
        PagingError: the model can't be paged, or not within the budget; ``minimum_bytes`` then is
            the least that would do. Or a speed or a time is none.
        ByteSizeError: the budget is no number of bytes.
    """
    check_host(host)
    checked_model(model, has_values=False)
    from_disk = isinstance(host, Path)
    elsewhere = Elsewhere.CPU if from_disk else Elsewhere.FOLDER
    chosen = checked_device(device, from_disk=from_disk, elsewhere=elsewhere)
    check_seconds_and_speed(link_bytes_per_s, compute_s)
    link = speed_of(host)
    if link_bytes_per_s is not None:
        link = LinkSpeed(link_bytes_per_s)
    return make_plan(model, chosen, max_layer_size, budget, keep, link, compute_s).plan


def speed_of(host: str | Path) -> LinkSpeed:
    """What copies from a host are assumed to take."""
    return DISK if isinstance(host, Path) else PCIE_4


def make_plan(
    model: nn.Module,
    device: torch.device,
    max_layer_size: int | str,
    budget: int | str | None,
    keep: Iterable[str],
    link: LinkSpeed = PCIE_4,
    compute_s: float | None = None,
) -> Planned:
    """As ``plan_paging``, of a model that is checked, with what carrying it out needs."""
    size = checked_layer_size(max_layer_size)
    budget_bytes = checked_budget(budget, device)
    kept = checked_kept(model, keep)
    sizes = _unit_sizes(model, budget_bytes) if size is None else [size]
    drafts = [_Draft.of(model, each, kept) for each in sizes]
    minimum_bytes = min(draft.minimum_bytes for draft in drafts)
    divided = [draft.divide(budget_bytes, link, compute_s) for draft in drafts]
    possible = [
        (expected_s(draft.cut, division, link, compute_s), _Choice(draft, division))
        for draft, division in zip(drafts, divided, strict=True)
        if division is not None
    ]
    choice = preferred(possible)
    if choice is None:
        raise _too_small(model, min(drafts, key=lambda draft: draft.minimum_bytes), budget_bytes)
    draft, division = choice.draft, choice.division
    passing_bytes = n_bytes(unit for unit in draft.cut.units if unit not in division.resident)
    resident_bytes = draft.whole_bytes + n_bytes(division.resident)
    device_bytes = resident_bytes + division.ring_bytes
    plan = PagingPlan(
        model=type(model).__name__,
        device=str(device),
        units=tuple(
            PlannedUnit(unit.name, unit.n_bytes, unit in division.resident)
            for unit in draft.cut.units
        ),
        weight_bytes=n_bytes(draft.cut.units) + draft.whole_bytes,
        resident_bytes=resident_bytes,
        ring_bytes=division.ring_bytes,
        device_bytes=device_bytes,
        budget_bytes=device_bytes if budget_bytes is None else budget_bytes,
        minimum_bytes=minimum_bytes,
        link_bytes_per_s=link.bytes_per_s,
        limit_s=max(passing_bytes / link.bytes_per_s, compute_s or 0.0),
        predicted_s=predicted_pass_s(draft.cut, division, link, compute_s or 0.0),
    )
    return Planned(plan, draft.table, draft.cut, division, draft.kept)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A model cut in one way.

    Attributes:
        table: its tensors.
        cut: its units.
        kept: those that must stay: what was asked for, and what no forward brackets, for it may be
            in use beside any other unit. A mask that the first layer gives out is, to the last.
        whole_bytes: what can't be paged.
    """

    table: TensorTable
    cut: Cut
    kept: frozenset[Unit]
    whole_bytes: int

    @classmethod
    def of(cls, model: nn.Module, size: UnitSize, kept: list[nn.Module]) -> Self:
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
        return cls(table, pieces, staying, table.whole_bytes)

    @property
    def minimum_bytes(self) -> int:
        """The least budget for this cut."""
        passing_bytes = minimum_ring_bytes(self.cut, self.kept)
        return self.whole_bytes + n_bytes(self.kept) + passing_bytes

    def divide(
        self, budget_bytes: int | None, link: LinkSpeed, compute_s: float | None
    ) -> Residency | None:
        """The best division of a budget; without one, what keeps the link busy."""
        if budget_bytes is None:
            return smallest(self.cut, self.kept, _NEIGHBOURS)
        return divide(self.cut, self.kept, budget_bytes - self.whole_bytes, link, compute_s)


@dataclass(frozen=True, slots=True)
class _Choice:
    draft: _Draft
    division: Residency

    @property
    def ring_bytes(self) -> int:
        return self.division.ring_bytes


def _unit_sizes(model: nn.Module, budget_bytes: int | None) -> list[UnitSize]:
    """How large units may be: large ones spare the latency of copies, small ones the ring."""
    if budget_bytes is None:
        weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
        return [UnitSize(min(64 * _MIB, weight_bytes // 16))]
    large = (UnitSize(n_bytes) for n_bytes in _some(sizes_with_own(model, TensorTable(model))))
    return [*(UnitSize(budget_bytes // parts) for parts in _PARTS), *large, UnitSize(0)]


def _some(sizes: set[int]) -> list[int]:
    """A few sizes that stand for all: each costs a plan."""
    every = -(-len(sizes) // _MOST_SIZES) or 1
    return sorted(sizes)[::-1][::every]


def _too_small(model: nn.Module, draft: _Draft, budget_bytes: int | None) -> PagingError:
    minimum_bytes = draft.minimum_bytes
    stays_bytes = draft.whole_bytes + n_bytes(draft.kept)
    ring_bytes = minimum_bytes - stays_bytes
    stays = f", beside {format_bytes(stays_bytes)} that stay" if stays_bytes else ""
    return PagingError(
        f"{type(model).__name__} can't be paged within {format_bytes(budget_bytes or 0)}: the "
        f"least is {format_bytes(minimum_bytes)} ({minimum_bytes} bytes), because "
        f"{format_bytes(ring_bytes)} of its weights are needed at once{stays}. "
        "Allow a larger budget.",
        minimum_bytes,
    )


def _in_units(bytes_in_all: int, n_units: int) -> str:
    return f"{format_bytes(bytes_in_all)} in {n_units} {'unit' if n_units == 1 else 'units'}"
