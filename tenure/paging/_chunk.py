"""The other way to run a model that is too large: some layers on the device, the rest on the host.

Invariant: a layer is computed where its weights are. Between layers, activations are on the device.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tenure._account import taken
from tenure._cuda_blocks import taken_by
from tenure._errors import PagingError
from tenure._text import parse_bytes
from tenure._torch.quiet import aside_with_subclasses

from ._device import RESIDENT, Arrangement, Engine, Forward, in_place_of
from ._forward import Arguments, Pager, moved
from ._functions import carry_out
from ._handle import PagedModel
from ._host import HostBuffers
from ._link import Link
from ._model import Cut, HostTensor, TensorTable, Unit, cut
from ._planning import (
    PCIE_4,
    PagingPlan,
    Planned,
    PlannedUnit,
    arrange,
    checked_device,
    checked_model,
    n_bytes,
)

_HOST = torch.device("cpu")


def chunk(
    model: nn.Module,
    device: str | torch.device = "cuda",
    max_capacity: int | str = 10**9,
) -> PagedModel:
    """Compute the first layers of a model on a device and the rest on the host; no weight moves.

    For a model that is called so seldom, or with so few samples, that moving its weights would
    take longer than to compute on the host. Inputs may be on the host; outputs are on the device.

    Args:
        model: a model in host memory.
        device: the accelerator.
        max_capacity: how many parameters the device may hold, or how many bytes of them such as
            ``"6GiB"``. Layers are taken in the order of their registration, as long as they fit.

    Returns:
        The handle, as of ``page``.

    Raises:
        PagingError: the model can't be moved, or the capacity is none; the model is as before.
        ByteSizeError: the capacity is no number of bytes.
        torch.OutOfMemoryError: the device has less free than that; the model is as before.

    Source: ``chunk`` of pytorch-optimem.
    """
    checked_model(model)
    chosen = checked_device(device)

    def make_pager(planned: Planned) -> Pager:
        store = HostBuffers(chosen, pin=True)
        engine = Engine(Link(chosen), store, planned.cut.units, 0)
        return ChunkPager(engine, planned.table.hosts.values())

    return carry_out(
        model, chosen, None, lambda _: _planned(model, chosen, max_capacity), make_pager
    )


class ChunkPager(Pager):
    """Shows the device's weights, except to a module that is computed on the host.

    Args:
        engine: as of a pager.
        hosts: as of a pager.
    """

    def __init__(self, engine: Engine, hosts: Collection[HostTensor]) -> None:
        super().__init__(engine, hosts)
        # Those that are computed on the host, one inside the other.
        self._on_host: list[Forward] = []

    def enter(self, forward: Forward, token: object, units: list[Unit], module: nn.Module) -> bool:
        """Enter as a pager does; a module with any weight on the host is computed there."""
        there = [unit for unit in units if self.engine.stays(unit)]
        if not super().enter(forward, token, there, module):
            return False
        if len(there) < len(units):
            self._on_host.append(forward)
            self.on_leave(self._on_host.pop)
        return True

    def arguments(self, forward: Forward, given: Any) -> Arguments | None:
        """Return the arguments as a pager does, or on the host."""
        if forward not in self._on_host:
            return super().arguments(forward, given)
        arguments = Arguments(given, self.engine.device.type, _HOST)
        self.on_leave(arguments.hand_back)
        return arguments

    def result(self, forward: Forward, output: Any) -> Any:
        """Return the result as a pager does, on the device."""
        safe = super().result(forward, output)
        # Of modules that run on the host one inside the other, only the outermost has an output
        # that a layer on the device may get.
        return moved(safe, "cpu", self.engine.device) if self._on_host == [forward] else safe

    def show(self, host: HostTensor) -> Tensor:
        """Show as a pager does; a weight that only another module could use is copied."""
        if self.is_inside and self._on_host:
            return host.tensor
        # A model that reads the weight of a layer it does not call, as a tied head does, computes
        # on the device with a weight of the host's.
        if not self.is_inside or all(map(self.engine.stays, host.units)):
            return super().show(host)
        with aside_with_subclasses():
            copy = taken(lambda: host.tensor.detach().to(self.engine.device), RESIDENT)
            return in_place_of(host.tensor, copy)


def _planned(model: nn.Module, device: torch.device, max_capacity: int | str) -> Planned:
    table = TensorTable(model)
    # As small as can be: a unit is computed on one side as a whole, and room on the device that is
    # too small for a block may do for its attention.
    pieces = cut(model, table, lambda module: False)
    arrangement = _arranged(pieces, max_capacity, device)
    resident = arrangement.units
    needed = taken_by(arrangement.sizes, device)
    plan = PagingPlan(
        model=type(model).__name__,
        device=str(device),
        units=tuple(PlannedUnit(u.name, u.n_bytes, u in resident) for u in pieces.units),
        weight_bytes=n_bytes(pieces.units),
        resident_bytes=arrangement.resident_bytes,
        ring_bytes=0,
        allocated_bytes=needed.allocated_bytes,
        reserved_bytes=needed.reserved_bytes,
        budget_bytes=needed.allocated_bytes,
        minimum_bytes=0,
        link_bytes_per_s=PCIE_4.bytes_per_s,
        limit_s=0.0,
        predicted_s=0.0,
        computes_on_host=True,
    )
    return Planned(plan, table, pieces, arrangement, resident)


def _arranged(pieces: Cut, max_capacity: int | str, device: torch.device) -> Arrangement:
    """Return the units from the first on that fit."""
    is_text = isinstance(max_capacity, str)
    capacity = parse_bytes(max_capacity) if isinstance(max_capacity, str) else max_capacity
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0:
        raise PagingError(
            f"max_capacity={max_capacity!r}: write a number of parameters, or of bytes such as "
            '"6GiB".'
        )
    sizes = accumulate(unit.n_bytes if is_text else _n_parameters(unit) for unit in pieces.units)
    n_fitting = sum(size <= capacity for size in sizes)
    while True:
        arrangement = arrange(0, pieces.units[:n_fitting], (), device)
        # What the allocator rounds up counts: text names bytes of the device.
        if not is_text or taken_by(arrangement.sizes, device).allocated_bytes <= capacity:
            return arrangement
        n_fitting -= 1


def _n_parameters(unit: Unit) -> int:
    return sum(host.tensor.numel() for host in unit.tensors if not host.is_buffer)
