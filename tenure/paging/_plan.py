"""The plan of a paged model: what stays, what passes, and how near to the limit that can run.

Invariant: a plan is made from the model's sizes alone. Nothing is allocated, moved or run for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tenure._errors import PagingError
from tenure._units import format_bytes, parse_bytes

from ._checks import (
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
    minimum_ring_bytes,
    predicted_pass_s,
    smallest,
)
from ._table import TensorTable, n_bytes_of_whole
from ._units import Cut, Fits, Unit, cut, n_bytes_in

_MIB = 2**20
_NEIGHBOURS = 4
PCIE_4 = LinkSpeed(bytes_per_s=24e9)
"""What a plan assumes where nothing was measured: PCIe 4.0 with 16 lanes."""


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
        weight_bytes: all units together.
        resident_bytes: what stays on the device, with tensors that can't be paged.
        ring_bytes: the room that the others pass through.
        device_bytes: both: what paging takes of the device, always.
        budget_bytes: what it was allowed to take.
        minimum_bytes: the least budget that would do.
        link_bytes_per_s: the assumed speed of copies.
        limit_s: the least time of a pass: ``max((W-R)/BW, C)``.
        predicted_s: the time of a pass in the steady state by this plan.
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

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        passing = [unit for unit in self.units if not unit.resident]
        n_resident = len(self.units) - len(passing)
        passing_bytes = sum(unit.n_bytes for unit in passing)
        width = max((len(unit.name) for unit in self.units), default=0)
        return [
            f"{self.model} on {self.device}: {_in_units(self.weight_bytes, len(self.units))}, "
            f"within {format_bytes(self.budget_bytes)} (at least {format_bytes(self.minimum_bytes)})",
            f"  stays   {_in_units(self.resident_bytes, n_resident)}",
            f"  passes  {_in_units(passing_bytes, len(passing))}, "
            f"through a ring of {format_bytes(self.ring_bytes)}",
            f"  a pass  takes {self.limit_s * 1e3:.3f} ms at the least, and "
            f"{self.predicted_s * 1e3:.3f} ms by this plan, at "
            f"{self.link_bytes_per_s / 1e9:.1f} GB/s",
            *(
                f"    {unit.name:{width}}  {format_bytes(unit.n_bytes):>10}  "
                f"{'stays' if unit.resident else 'passes'}"
                for unit in self.units
            ),
        ]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what carrying it out needs.

    Attributes:
        plan: for the user.
        table: the model's tensors.
        cut: its units.
        division: of the device's memory.
    """

    plan: PagingPlan
    table: TensorTable
    cut: Cut
    division: Residency


def plan_paging(
    model: nn.Module,
    device: str | torch.device = "cuda",
    max_layer_size: int | str = -1,
    *,
    budget: int | str | None = None,
    keep: Iterable[str] = (),
    link_bytes_per_s: float = PCIE_4.bytes_per_s,
    compute_s: float | None = None,
) -> PagingPlan:
    """Say how ``page`` would divide the device, without doing it.

    Args:
        model: a model in host memory.
        device: the accelerator.
        max_layer_size: as of ``page``.
        budget: as of ``page``.
        keep: as of ``page``.
        link_bytes_per_s: the speed of copies to the device.
        compute_s: seconds that a pass computes, if known.

    Raises:
        PagingError: the model can't be paged, or not within the budget; ``minimum_bytes`` then is
            the least that would do.
        ByteSizeError: the budget is no number of bytes.
    """
    chosen = checked_device(device)
    link = LinkSpeed(link_bytes_per_s)
    return make_plan(model, chosen, max_layer_size, budget, keep, link, compute_s).plan


def make_plan(
    model: nn.Module,
    device: torch.device,
    max_layer_size: int | str,
    budget: int | str | None,
    keep: Iterable[str],
    link: LinkSpeed = PCIE_4,
    compute_s: float | None = None,
) -> Planned:
    """As ``plan_paging``, with what carrying it out needs."""
    checked_model(model)
    size = checked_layer_size(max_layer_size)
    budget_bytes = checked_budget(budget, device)
    kept_modules = checked_kept(model, keep)
    table = TensorTable(model)
    whole_bytes = sum(n_bytes_of_whole(host.tensor) for host in table.whole)
    inside = {each for module in kept_modules for each in module.modules()}
    free_bytes = None if budget_bytes is None else budget_bytes - whole_bytes
    if free_bytes is not None:
        free_bytes = max(0, free_bytes - n_bytes_in(table, inside))
    cut_model = _cut(model, table, size, free_bytes, kept_modules)
    kept = _units_of(table, cut_model, inside)
    minimum_bytes = whole_bytes + _n_bytes(kept) + minimum_ring_bytes(cut_model, kept)
    division = (
        smallest(cut_model, kept, _NEIGHBOURS)
        if budget_bytes is None
        else divide(cut_model, kept, budget_bytes - whole_bytes, link, compute_s)
    )
    if division is None:
        raise PagingError(
            f"{type(model).__name__} can't be paged within {format_bytes(budget_bytes or 0)}: it "
            f"needs {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) at the least, for "
            f"{_what_needs(cut_model, kept, whole_bytes)}. Allow a larger budget"
            f"{'' if size == -1 else ', or a smaller max_layer_size'}.",
            minimum_bytes,
        )
    device_bytes = whole_bytes + _n_bytes(division.resident) + division.ring_bytes
    plan = PagingPlan(
        model=type(model).__name__,
        device=str(device),
        units=tuple(
            PlannedUnit(unit.name, unit.n_bytes, unit in division.resident)
            for unit in cut_model.units
        ),
        weight_bytes=_n_bytes(cut_model.units),
        resident_bytes=whole_bytes + _n_bytes(division.resident),
        ring_bytes=division.ring_bytes,
        device_bytes=device_bytes,
        budget_bytes=device_bytes if budget_bytes is None else budget_bytes,
        minimum_bytes=minimum_bytes,
        link_bytes_per_s=link.bytes_per_s,
        limit_s=max(_passing_bytes(cut_model, division) / link.bytes_per_s, compute_s or 0.0),
        predicted_s=predicted_pass_s(cut_model, division, link, compute_s or 0.0),
    )
    return Planned(plan, table, cut_model, division)


def _cut(
    model: nn.Module,
    table: TensorTable,
    size: int | str,
    free_bytes: int | None,
    kept: list[nn.Module],
) -> Cut:
    if size != -1:
        return cut(model, table, _fits(table, size), apart=kept)
    unit_bytes = _unit_bytes(n_bytes_in(table, model.modules()), free_bytes)
    fits = _fits(table, f"{unit_bytes}B")
    return cut(model, table, fits, merge_bytes=unit_bytes, apart=kept)


def _unit_bytes(weight_bytes: int, free_bytes: int | None) -> int:
    """Large enough for the latency of a copy not to matter, small enough for the ring."""
    if free_bytes is None:
        return max(min(8 * _MIB, weight_bytes // 16), min(64 * _MIB, weight_bytes // 32))
    return max(min(8 * _MIB, free_bytes // 4), min(64 * _MIB, free_bytes // 32))


def _fits(table: TensorTable, size: int | str) -> Fits:
    if isinstance(size, str):
        limit_bytes = parse_bytes(size)
        return lambda module: n_bytes_in(table, module.modules()) <= limit_bytes
    return lambda module: sum(p.numel() for p in module.parameters()) < size


def _units_of(table: TensorTable, cut_model: Cut, modules: Iterable[nn.Module]) -> frozenset[Unit]:
    extents = table.extents_of(iter(modules))
    return frozenset(
        unit for unit in cut_model.units if any(extent in extents for extent in unit.extents)
    )


def _what_needs(cut_model: Cut, kept: frozenset[Unit], whole_bytes: int) -> str:
    largest = max((u for u in cut_model.units if u not in kept), key=lambda u: u.n_bytes)
    what = f"{largest.name!r} ({format_bytes(largest.n_bytes)})"
    stays_bytes = whole_bytes + _n_bytes(kept)
    return f"{what} and {format_bytes(stays_bytes)} that stay" if stays_bytes else what


def _passing_bytes(cut_model: Cut, division: Residency) -> int:
    return _n_bytes(unit for unit in cut_model.units if unit not in division.resident)


def _n_bytes(units: Iterable[Unit]) -> int:
    return sum(unit.n_bytes for unit in units)


def _in_units(n_bytes: int, n_units: Any) -> str:
    return f"{format_bytes(n_bytes)} in {n_units} {'unit' if n_units == 1 else 'units'}"
