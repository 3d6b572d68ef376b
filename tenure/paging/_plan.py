"""The plan of a paged model: what stays, what passes, and how near to the limit that can run.

What it takes of the device beside its weights is told before it runs: the model runs on tensors
without data, as `tenure.adaptive.predict_peak` has it; gradients leave, and activations if that is
wanted, as they do where it is paged. Only for that paging asks `adaptive` for something.

Invariant: a plan is made from the model's sizes alone, and the model is left as it was. Nothing is
allocated, moved or computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tenure._containers import tensors_in
from tenure._cuda_blocks import rounded, taken_by
from tenure._errors import PagingError
from tenure._text import counted, format_bytes, parse_share
from tenure._torch.storages import key_of

from ._activations import LARGEST_PIECES, SMALL_BYTES, range_to_move
from ._budget import AUTO, PagingBudget, shared_budget
from ._checks import (
    check_activations,
    check_seconds_and_speed,
    check_training,
    checked_budget,
    checked_device,
    checked_host,
    checked_kept,
    checked_layer_size,
    checked_model,
    instead_of_accelerator,
)
from ._division import Budget, Cut, Draft, LinkSpeed, n_bytes, too_small, unit_sizes
from ._memory import Arrangement
from ._tensors import TensorTable, Unit
from ._training import MOST_UNITS


def predicted_beside(
    model: nn.Module, inputs: Any, device: torch.device, units: list[Unit] | None, *, moves: bool
) -> tuple[int, int]:
    """Predict what a pass takes beside weights, and what kernels may take on top of that.

    Args:
        model: on the host, or on meta.
        inputs: one tensor, a tuple of arguments, or a dictionary of them by name.
        device: where it is to be paged.
        units: of a model that is trained; None for a pass without gradients.
        moves: whether activations go to the host.

    Raises:
        PagingError: the inputs are no arguments.
        PredictionError: nothing can be said of the model's memory.
    """
    from tenure.adaptive import predict_peak

    args, kwargs = _arguments(inputs)
    largest_bytes = 0

    def run(*args: Any, **kwargs: Any) -> None:
        nonlocal largest_bytes
        given = [each for each in tensors_in([args, kwargs]) if each.grad_fn is None]
        others = {key_of(each.untyped_storage()) for each in (*_tensors_of(model), *given)}
        on_host = _SimulatedHost(device, others)
        with torch.set_grad_enabled(units is not None):
            with saved_tensors_hooks(on_host.pack, on_host.unpack) if moves else nullcontext():
                output = model(*args, **kwargs)
            largest_bytes = on_host.largest_bytes
            if units is not None:
                with _gradients_leave(units):
                    _run_backward(output)

    report = predict_peak(run, *args, device=device, **kwargs)
    weights = {key_of(each.untyped_storage()): each for each in _tensors_of(model)}
    sizes = [t.untyped_storage().nbytes() for t in weights.values()]
    if report.allocated_bytes is None:
        n_bytes = report.peak_bytes - sum(sizes)
    else:
        n_bytes = report.allocated_bytes - sum(map(rounded, sizes))
    return n_bytes + LARGEST_PIECES * largest_bytes, report.allowance_bytes


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from (*model.parameters(), *model.buffers())


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    raise PagingError(
        f"inputs= got {type(inputs).__name__}: give what the model is called with, a tensor, a "
        "tuple of arguments, or a dictionary of them by name. Tensors of meta will do."
    )


def _run_backward(output: Any) -> None:
    """Run backward as from a loss without memory of its own: only its gradient exists."""
    loss = getattr(output, "loss", None)
    outputs = [loss] if isinstance(loss, Tensor) else tensors_in([output])
    ends = [each for each in outputs if each.requires_grad]
    del output, outputs, loss
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])


@contextmanager
def _gradients_leave(units: list[Unit]) -> Iterator[None]:
    """Return a block in which gradients are there as long as they are on their way to the host."""
    under_way: dict[Unit, list[Tensor]] = {}

    def leaving(unit: Unit) -> Callable[[Tensor], None]:
        def leave(parameter: Tensor) -> None:
            while unit not in under_way and len(under_way) >= MOST_UNITS:
                del under_way[next(iter(under_way))]
            if parameter.grad is not None:
                under_way.setdefault(unit, []).append(parameter.grad)
            parameter.grad = None

        return leave

    with ExitStack() as hooks:
        for unit in units:
            for host in unit.tensors:
                if host.tensor.requires_grad and host.tensor.is_leaf:
                    handle = host.tensor.register_post_accumulate_grad_hook(leaving(unit))
                    hooks.callback(handle.remove)
        yield


class _SimulatedHost:
    """Holds what graphs save, away from the device until a node asks for it.

    In truth the largest pieces stay for a while, and come back ahead: the caller adds them.

    Args:
        device: where the model computes.
        others: the storages that stay, because others keep them.

    Attributes:
        largest_bytes: of what was saved.
    """

    def __init__(self, device: torch.device, others: set[int]) -> None:
        self._device, self._others = device, others
        self.largest_bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """Return what a node keeps in place of a tensor."""
        is_parameter = tensor.requires_grad and tensor.is_leaf
        stays = tensor.numel() * tensor.element_size() < SMALL_BYTES or is_parameter
        if stays or key_of(tensor.untyped_storage()) in self._others:
            return tensor.detach()
        start, end = range_to_move(tensor)
        self.largest_bytes = max(self.largest_bytes, end - start)
        return tensor.dtype, tensor.size(), tensor.stride()

    def unpack(self, packed: Any) -> Tensor:
        """Return a tensor of the same form."""
        if isinstance(packed, Tensor):
            return packed
        dtype, size, strides = packed
        return torch.empty_strided(size, strides, dtype=dtype, device=self._device)


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
        weight_bytes: all units together.
        resident_bytes: what stays on the device, and what the rounding of the device's allocator
            leaves over.
        ring_bytes: the room that the others pass through.
        allocated_bytes: both: what paging takes of the device, until it gives some back.
        reserved_bytes: the memory of the device that goes for it: its allocator takes whole
            segments, which it shares out to others as well. As of one that is empty before.
        budget_bytes: what it was allowed to allocate.
        minimum_bytes: the least budget that would do.
        link_bytes_per_s: the assumed speed of copies.
        limit_s: the least time of a pass: ``max((W-R)/BW, C)``.
        predicted_s: the time of a pass in the steady state by this plan.
        computes_on_host: whether what does not stay is computed on the host, by ``chunk``.
        activations: where those that a backward pass needs are, as ``page`` was told.
        kept_activation_bytes: what a pass takes beside weights where they stay on the device; None
            where no inputs were given.
        host_activation_bytes: the same where they are on the host; None also where nothing is
            trained.
        allowance_bytes: what kernels may take on top, at the most.
    """

    model: str
    device: str
    units: tuple[PlannedUnit, ...] = field(repr=False)
    weight_bytes: int
    resident_bytes: int
    ring_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    budget_bytes: int
    minimum_bytes: int
    link_bytes_per_s: float
    limit_s: float
    predicted_s: float
    computes_on_host: bool = False
    activations: str | None = None
    kept_activation_bytes: int | None = None
    host_activation_bytes: int | None = None
    allowance_bytes: int = 0

    @property
    def activation_bytes(self) -> int | None:
        """What a pass takes beside weights; None where no inputs were given."""
        is_moved = self.activations == "host"
        return self.host_activation_bytes if is_moved else self.kept_activation_bytes

    @property
    def peak_bytes(self) -> int | None:
        """What a pass takes of the device, weights and all; None where no inputs were given."""
        beside_bytes = self.activation_bytes
        return None if beside_bytes is None else self.allocated_bytes + beside_bytes

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        passing = [unit.n_bytes for unit in self.units if not unit.resident]
        weights = _in_units(self.weight_bytes, len(self.units))
        yield (
            f"{self.model} on {self.device}: {weights}, within {format_bytes(self.budget_bytes)} "
            f"(at least {format_bytes(self.minimum_bytes)})"
        )
        yield f"  stays   {_in_units(self.resident_bytes, len(self.units) - len(passing))}"
        if self.computes_on_host:
            yield f"  host    {_in_units(sum(passing), len(passing))}, computed there"
        else:
            yield (
                f"  passes  {_in_units(sum(passing), len(passing))}, through a ring of "
                f"{format_bytes(self.ring_bytes)}"
            )
            yield (
                f"  a pass  takes {self.limit_s * 1e3:.3f} ms at the least, and "
                f"{self.predicted_s * 1e3:.3f} ms by this plan, at "
                f"{self.link_bytes_per_s / 1e9:.1f} GB/s"
            )
        if self.reserved_bytes != self.resident_bytes + self.ring_bytes:
            yield (
                f"  takes   {format_bytes(self.allocated_bytes)} of {self.device}, in "
                f"{format_bytes(self.reserved_bytes)} that its allocator reserves"
            )
        kept_bytes, host_bytes = self.kept_activation_bytes, self.host_activation_bytes
        if self.activation_bytes is not None and self.peak_bytes is not None:
            yield (
                f"  beside  {format_bytes(self.activation_bytes)} of activations and inputs: "
                f"{format_bytes(self.peak_bytes)} in all at most"
            )
            if self.allowance_bytes:
                allowance = format_bytes(self.allowance_bytes)
                yield f"          and up to {allowance} that kernels may take"
            if kept_bytes is not None and host_bytes is not None:
                lowers = "lowers" if host_bytes < kept_bytes else "does not lower"
                yield (
                    f'          activations="host" {lowers} it: {format_bytes(host_bytes)}, and '
                    f"{format_bytes(kept_bytes)} without"
                )
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
        arrangement: the slabs that the units stand in that stay.
        kept: the units that stay, whatever happens.
    """

    plan: PagingPlan
    table: TensorTable
    cut: Cut
    arrangement: Arrangement
    kept: frozenset[Unit]


def plan_paging(
    model: nn.Module,
    device: str | torch.device = "cuda",
    max_layer_size: int | str = -1,
    *,
    budget: int | str | PagingBudget | None = None,
    host: str | Path = "pinned",
    keep: Iterable[str] = (),
    link_bytes_per_s: float | None = None,
    compute_s: float | None = None,
    inputs: Any = None,
    training: bool = False,
    activations: str | None = None,
) -> PagingPlan:
    """Say how ``page`` would divide the device, without doing it.

    Args:
        model: a model in host memory, or on ``meta``.
        device: the accelerator, which need not be here; ``"cpu"`` where the host is a folder.
        max_layer_size: as of ``page``.
        budget: as of ``page``.
        host: as of ``page``; for ``load_paged``, the path of the weights. Nothing is read or made.
        keep: as of ``page``.
        link_bytes_per_s: the speed of copies to the device; by default that of PCIe 4.0, or, where
            the host is a path, 2 GB/s.
        compute_s: seconds that a pass computes, if known.
        inputs: what the model is called with, a tensor, a tuple of arguments or a dictionary of
            them by name; of ``meta`` will do. The model runs on tensors without data then, and the
            plan tells what a pass takes beside weights.
        training: whether that is a forward and a backward pass, as of ``page``.
        activations: as of ``page``; the plan tells both.

    Returns:
        The plan: printable, and with its bytes and times as attributes.

    Raises:
        PagingError: the model can't be paged, or not within the budget; ``minimum_bytes`` then is
            the least that would do. Or a speed or a time is none.
        ByteSizeError: the budget is no number of bytes.
        PredictionError: nothing can be said of what the inputs lead to.
    """
    host = checked_host(host, may_be_file=True)
    check_training(training, device, host)
    check_activations(activations, training=training)
    checked_model(model, has_values=False)
    elsewhere = instead_of_accelerator(host, training=training)
    # a budget in bytes says all that a plan has to know of the device
    is_text = isinstance(budget, str) and budget != AUTO and parse_share(budget) is None
    is_known = isinstance(budget, int | None) or is_text
    chosen = checked_device(device, elsewhere, may_be_missing=is_known)
    check_seconds_and_speed(link_bytes_per_s, compute_s)
    link = speed_of(host)
    if link_bytes_per_s is not None:
        link = LinkSpeed(link_bytes_per_s)

    def plan(allowed: int | str | Budget | None) -> Planned:
        return make_plan(model, chosen, max_layer_size, allowed, keep, link, compute_s)

    shared = shared_budget(budget, chosen)
    if shared is None:
        assert not isinstance(budget, PagingBudget)
        planned = plan(budget)
    else:
        # As the next model to be paged
        planned = shared._fitted(chosen, lambda most, now: plan(Budget(most, now_bytes=now)))
    made = replace(planned.plan, activations=activations)
    if inputs is None:
        return made
    units = planned.cut.units if training else None
    kept_bytes, allowance_bytes = predicted_beside(model, inputs, chosen, units, moves=False)
    made = replace(made, kept_activation_bytes=kept_bytes, allowance_bytes=allowance_bytes)
    if not training:
        return made
    moved_bytes, _ = predicted_beside(model, inputs, chosen, units, moves=True)
    return replace(made, host_activation_bytes=moved_bytes)


def speed_of(host: str | Path) -> LinkSpeed:
    """Return the assumed speed of copies from this host."""
    return DISK if isinstance(host, Path) else PCIE_4


def make_plan(
    model: nn.Module,
    device: torch.device,
    max_layer_size: int | str,
    budget: int | str | Budget | None,
    keep: Iterable[str],
    link: LinkSpeed = PCIE_4,
    compute_s: float | None = None,
) -> Planned:
    """Plan as ``plan_paging`` does for a checked model, with all that paging needs."""
    size = checked_layer_size(max_layer_size)
    allowed = budget if isinstance(budget, Budget) else checked_budget(budget, device)
    kept = checked_kept(model, keep)
    sizes = unit_sizes(model, allowed, link) if size is None else [size]
    drafts = [Draft(model, device, each, kept) for each in sizes]
    # The least of all cuts, not of the chosen one: with that budget, another cut would be chosen.
    least = [draft.least.allocated_bytes for draft in drafts]
    divided = [(draft, draft.divide(allowed)) for draft in drafts]
    possible = [(draft, found) for draft, found in divided if found is not None]
    if not possible:
        smallest = drafts[least.index(min(least))]
        raise too_small(model, smallest, allowed or Budget(0))
    draft, arrangement = min(possible, key=lambda each: _pass_s(each[0], each[1], link, None))
    passing_bytes = n_bytes(draft.cut.units) - n_bytes(arrangement.units)
    return planned_as(
        draft.table, draft.cut, arrangement, draft.kept, model, device,
        budget_bytes=None if allowed is None else allowed.n_bytes,
        minimum_bytes=min(least),
        link_bytes_per_s=link.bytes_per_s,
        limit_s=max(passing_bytes / link.bytes_per_s, compute_s or 0.0),
        predicted_s=_pass_s(draft, arrangement, link, compute_s or 0.0),
    )  # fmt: skip


def planned_as(
    table: TensorTable,
    cut: Cut,
    arrangement: Arrangement,
    kept: frozenset[Unit],
    model: nn.Module,
    device: torch.device,
    *,
    budget_bytes: int | None = None,
    **figures: Any,
) -> Planned:
    """Return a plan and what carries it out; without a budget, that is what it takes."""
    taken, resident = taken_by(arrangement.sizes, device), arrangement.units
    plan = PagingPlan(
        model=type(model).__name__,
        device=str(device),
        units=tuple(PlannedUnit(u.name, u.n_bytes, u in resident) for u in cut.units),
        weight_bytes=n_bytes(cut.units),
        resident_bytes=arrangement.resident_bytes,
        ring_bytes=arrangement.ring_bytes,
        allocated_bytes=taken.allocated_bytes,
        reserved_bytes=taken.reserved_bytes,
        budget_bytes=taken.allocated_bytes if budget_bytes is None else budget_bytes,
        **figures,
    )
    return Planned(plan, table, cut, arrangement, kept)


def _pass_s(
    draft: Draft, arrangement: Arrangement, link: LinkSpeed, compute_s: float | None
) -> float:
    """Seconds of a pass of many, its computation spread by bytes; half of all copies if unknown."""
    weight_bytes, resident = n_bytes(draft.cut.units), arrangement.units
    if compute_s is None:
        compute_s = weight_bytes / link.bytes_per_s / 2
    passing = [unit for unit in draft.cut.units if unit not in resident]
    copy_s = n_bytes(passing) / link.bytes_per_s
    # Nothing is copied while a unit computes that leaves no room for the next one.
    alone_bytes = draft.stalled_bytes(arrangement.ring_bytes, passing)
    alone_s = compute_s * alone_bytes / (weight_bytes or 1)
    return max(copy_s, compute_s - alone_s) + alone_s + len(passing) * link.latency_s


def _in_units(bytes_in_all: int, n_units: int) -> str:
    return f"{format_bytes(bytes_in_all)} in {counted(n_units, 'unit')}"
