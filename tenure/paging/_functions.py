"""The functions that page a model, or compute a part of it on the host.

Invariant: the model is the same object before and after, and where it can't be paged it is as it
was. Weights of a checkpoint are never all in memory. With `chunk` a layer is computed where its
weights are, and between layers activations are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from tenure._account import taken
from tenure._cuda_blocks import taken_by
from tenure._errors import PagingError
from tenure._registries import shrinkables
from tenure._text import parse_bytes
from tenure._torch.quiet import aside_with_subclasses

from ._arguments import Arguments
from ._budget import PagingBudget, shared_budget
from ._checkpoint import assigned, convert_names, open_checkpoint
from ._checks import (
    CPU,
    check_activations,
    check_training,
    checked_device,
    checked_folder_of_converted,
    checked_host,
    checked_methods,
    checked_model,
    checked_prefetch,
    instead_of_accelerator,
    warn_of_uncounted_writes,
)
from ._division import Budget, Cut, arrange, cut
from ._engine import Engine
from ._entry import Attached, Method
from ._file_link import FileLink
from ._files import FileStore, SpillStore, checked_folder
from ._handle import PagedModel
from ._host_buffers import HostBuffers
from ._link import Link
from ._memory import Arrangement
from ._page import RESIDENT, in_place_of
from ._pager import Pager
from ._pass import Forward
from ._plan import DISK, PCIE_4, Planned, make_plan, planned_as, speed_of
from ._sharded import ShardedModel, shard
from ._tensors import HostTensor, TensorTable, Unit
from ._training import TrainingEngine, TrainingPager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@overload
def page(
    model: nn.Module,
    device: str | torch.device = "cuda",
    max_layer_size: int | str = -1,
    *,
    budget: int | str | PagingBudget | None = None,
    host: str | Path = "pinned",
    keep: Iterable[str] = (),
    prefetch: str | int = "auto",
    methods: Iterable[str] = (),
    training: bool = False,
    activations: str | None = None,
    mesh: None = None,
) -> PagedModel: ...


@overload
def page(
    model: nn.Module,
    device: str | torch.device = "cuda",
    *,
    host: Literal["pinned", "pageable"] = "pinned",
    training: bool = False,
    mesh: DeviceMesh,
) -> ShardedModel: ...


def page(
    model: nn.Module,
    device: str | torch.device = "cuda",
    max_layer_size: int | str = -1,
    *,
    budget: int | str | PagingBudget | None = None,
    host: str | Path = "pinned",
    keep: Iterable[str] = (),
    prefetch: str | int = "auto",
    methods: Iterable[str] = (),
    training: bool = False,
    activations: str | None = None,
    mesh: DeviceMesh | None = None,
) -> PagedModel | ShardedModel:
    """Run a model on a device that can't hold it: its weights stay on the host and pass through.

    The model stays the same object, with the same modules, parameters, hooks and ``state_dict``.
    Inside its forward, and only there, its weights are seen on the device.

    Args:
        model: a model in host memory.
        device: the accelerator; ``"cpu"`` where the host is a folder.
        max_layer_size: a module with fewer parameters (an int) or with at most so many bytes (such
            as ``"64MiB"``) is moved in one piece; -1 leaves the choice to the planner.
        budget: the bytes of the device that weights may take: an int, text such as ``"6GiB"``, or
            ``"80%"`` of what is free now. Activations come on top. ``"auto"`` takes what is free
            from pass to pass, and gives it back as it is needed; a ``PagingBudget`` is shared with
            other models. None takes what keeps the link busy, and no more.
        host: ``"pinned"`` or ``"pageable"`` host memory; or the path of a folder on a disk, made if
            it is missing, where the weights are moved to. They take no host memory then, and their
            file goes with the model. Text is a path if it has a ``/`` or names what exists.
        keep: names of modules whose weights stay on the device.
        prefetch: how many parts are fetched ahead at most; ``"auto"`` for as many as fit.
        methods: names of methods that use weights beside the forward, such as
            ``("encode", "decode")``, or ``"text.encode"`` of a module inside. Where one of them
            runs, weights are seen and inputs are moved as in the forward.
        training: whether it is trained: its parameters get gradients, on the host, and a
            backward pass fetches weights again. The weights stay in host memory then.
        activations: ``"host"`` has what the forward saves for the backward pass wait in host
            memory, too; None leaves it on the device. ``plan_paging(..., inputs=...)`` says whether
            that lowers the peak.
        mesh: shard the model over these ranks by FSDP2 instead, with the shards in host memory; all
            ranks call this, with the same weights. Of the other arguments ``host`` may say whether
            to pin, and the rest is refused.

    Returns:
        The handle: ``report()``, ``plan``, ``unpage()``, and a block that unpages when it ends.
        With a mesh a `ShardedModel`.

    Raises:
        PagingError: the model can't be paged, or not within the budget; it is as before.
        ByteSizeError: the budget is no number of bytes.
        torch.OutOfMemoryError: the device has less free than the plan needs; it is as before.

    Example:
        >>> from torch import nn
        >>> from tenure.paging import PagingError, page
        >>> try:
        ...     page(nn.Linear(2, 2), "cpu")
        ... except PagingError as error:
        ...     print(error)
        A model in host memory can't be paged to 'cpu': there is nothing to gain. Name an
        accelerator, such as 'cuda', or 'cpu' with a folder: host=Path(...).

    Source: ``page`` of pytorch-optimem, where each layer is moved in and out synchronously.
    """
    if mesh is not None:
        ours = {"max_layer_size": max_layer_size != -1, "budget": budget is not None}
        ours |= {"keep": bool(tuple(keep)), "prefetch": prefetch != "auto"}
        ours |= {"methods": bool(tuple(methods)), "activations": activations is not None}
        return shard(model, mesh, device, host, [name for name, given in ours.items() if given])
    host = checked_host(host)
    check_training(training, device, host)
    check_activations(activations, training=training)
    max_ahead = checked_prefetch(prefetch)
    chosen = checked_device(device, instead_of_accelerator(host, training=training))
    checked_model(model)
    entries = checked_methods(model, methods)
    warn_of_uncounted_writes(model)

    def plan(allowed: int | str | Budget | None) -> Planned:
        return make_plan(model, chosen, max_layer_size, allowed, keep, speed_of(host))

    def make_pager(planned: Planned) -> Pager:
        units, hosts = planned.cut.units, planned.table.hosts.values()
        if isinstance(host, Path):
            files = SpillStore(checked_folder(host), planned.plan.model)
            return Pager(Engine(_file_link(planned, chosen, files), files, units, max_ahead), hosts)
        link, advice = Link(chosen), '; or say host="pageable"'
        store = HostBuffers(chosen, pin=host == "pinned", advice=advice)
        if not training:
            return Pager(Engine(link, store, units, max_ahead), hosts)
        moves = activations == "host"
        engine = TrainingEngine(
            link, store, units, max_ahead, store.memory, moves_activations=moves
        )
        return TrainingPager(engine, hosts)

    return carry_out(model, chosen, budget, plan, make_pager, entries)


def load_paged(
    model: nn.Module,
    weights: str | Path,
    device: str | torch.device = "cuda",
    max_layer_size: int | str = -1,
    *,
    budget: int | str | PagingBudget | None = None,
    host: str | Path | None = None,
    keep: Iterable[str] = (),
    prefetch: str | int = "auto",
    methods: Iterable[str] = (),
) -> PagedModel:
    """Run a model whose weights stay in safetensors files and pass through memory as they are used.

    The files are neither changed nor copied, and must not be changed while the model is paged. The
    model's parameters become tensors over them: they read the files when they are read, and what is
    written to them stays in memory.

    Args:
        model: a model on ``meta`` (built under ``torch.device("meta")``) or in host memory, whose
            values there are given up. Shapes and dtypes must be those of the files.
        weights: a safetensors file, the index of several (``model.safetensors.index.json``), or a
            folder that holds either, as transformers, diffusers and timm save it. Where a model of
            transformers saves its tensors under other names than its own, these are used.
        device: the accelerator, or ``"cpu"``.
        max_layer_size: as of ``page``.
        budget: the bytes that weights may take where the model computes; as of ``page``.
        host: a folder for what the files hold in another form than the model, such as the experts
            of a mixture one by one: that is written there once, to a file that has no name and
            goes with the model. Made if it is missing; not used where nothing has to be converted.
        keep: as of ``page``.
        prefetch: as of ``page``.
        methods: as of ``page``.

    Returns:
        The handle, as of ``page``. After ``unpage()`` the parameters still lie over the files.

    Raises:
        PagingError: a file can't be read, or does not fit the model, or the budget is too small;
            the model is as before.
        ByteSizeError: the budget is no number of bytes.
        torch.OutOfMemoryError: the device has less free than the plan needs; it is as before.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> from tenure.paging import load_paged
        >>> folder = tempfile.TemporaryDirectory()
        >>> save_file(torch.nn.Linear(2, 3).state_dict(), f"{folder.name}/model.safetensors")
        >>> model = torch.nn.Linear(2, 3, device="meta")
        >>> with load_paged(model, folder.name, "cpu"), torch.no_grad():
        ...     print(model(torch.ones(1, 2)).shape)
        torch.Size([1, 3])
        >>> folder.cleanup()
    """
    host = checked_folder_of_converted(host)
    max_ahead = checked_prefetch(prefetch)
    chosen = checked_device(device, CPU)
    checked_model(model, has_values=False)
    entries = checked_methods(model, methods)
    checkpoint = open_checkpoint(weights)
    try:
        # Before the model is given anything: what can't be named or converted is refused with the
        # model as it was.
        convert_names(checkpoint, model, host)
        with assigned(model, checkpoint):

            def plan(allowed: int | str | Budget | None) -> Planned:
                return make_plan(model, chosen, max_layer_size, allowed, keep, DISK)

            def make_pager(planned: Planned) -> Pager:
                store = FileStore(checkpoint.files)
                link, units = _file_link(planned, chosen, store), planned.cut.units
                return Pager(Engine(link, store, units, max_ahead), planned.table.hosts.values())

            return carry_out(model, chosen, budget, plan, make_pager, entries)
    except BaseException:
        # An interruption, too: until there is a handle, nobody else closes the files.
        checkpoint.close()
        raise


def carry_out(
    model: nn.Module,
    device: torch.device,
    budget: int | str | PagingBudget | None,
    plan: Callable[[int | str | Budget | None], Planned],
    make_pager: Callable[[Planned], Pager],
    methods: Iterable[Method] = (),
) -> PagedModel:
    """Plan, and page a model by the plan: all memory is allocated, or none.

    Args:
        model: the model.
        device: where it computes.
        budget: the bytes that weights may take.
        plan: makes the plan within a budget.
        make_pager: makes the pager that carries it out.
        methods: those beside the forward.

    Raises:
        PagingError: it does not fit, or files can't be written or read; nothing is allocated.
        torch.OutOfMemoryError: the device has no room; nothing is allocated.
    """
    shared, share = shared_budget(budget, device), None
    with ExitStack() as undoing:
        if shared is None:
            assert not isinstance(budget, PagingBudget)
            planned = plan(budget)
        else:
            planned, share = shared._join(
                device,
                lambda most, now: plan(Budget(most, now_bytes=now)),
                lambda planned: planned.plan.allocated_bytes,
            )
            undoing.callback(share.close)
        pager, arrangement = make_pager(planned), planned.arrangement
        engine, units = pager.engine, planned.cut.units
        undoing.callback(engine.close)
        # What else is in the budget, for who names one
        spare_bytes = 0 if share else planned.plan.budget_bytes - sum(arrangement.sizes)
        # The device first, for that is what may fail; to move weights on the host takes long.
        reserved = engine.room.reserve(arrangement, planned.kept, spare_bytes)
        if share is not None:
            share.serve(engine)
        # In the order of the model: so they are used, and so reports list them.
        stay = [unit for unit in units if unit in reserved]
        # Weights that are computed with on the host stay the model's own, not copied nor pinned.
        engine.adopt(stay if planned.plan.computes_on_host else units)
        engine.fill_residents({unit: reserved[unit] for unit in stay})
        undoing.pop_all()
    attached = Attached(model, planned.table, planned.cut, pager, methods)
    handle = PagedModel(model, planned.plan, pager, attached)
    # Last: from now on another model's retry may ask for memory, at any time.
    shrinkables.add(pager)
    if share is not None:
        share.let_give(pager)
    return handle


def _file_link(planned: Planned, device: torch.device, store: FileStore) -> FileLink:
    """Return the link from a store's files to a device, or to where the CPU computes."""
    largest_bytes = max((unit.n_bytes for unit in planned.cut.units), default=1)
    return FileLink(device, store.reader, largest_bytes)


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
        is_outer = self._on_host == [forward]
        return Arguments(safe, "cpu", self.engine.device).given if is_outer else safe

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
    return planned_as(
        table, pieces, arrangement, arrangement.units, model, device,
        minimum_bytes=0,
        link_bytes_per_s=PCIE_4.bytes_per_s,
        limit_s=0.0,
        predicted_s=0.0,
        computes_on_host=True,
    )  # fmt: skip


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
