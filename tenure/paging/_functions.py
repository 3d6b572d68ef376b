"""The functions that page a model, or compute a part of it on the host, and the handle they return.

Invariant: the model is the same object before and after, and where it can't be paged it is as it
was; unpaging, in whatever way the block ended, puts everything back. Weights of a checkpoint are
never all in memory. With `chunk` a layer is computed where its weights are, and between layers
activations are on the device.

An optimizer may step, part by part, while the backward pass that computes its gradients runs: each
parameter once, with its whole gradient, when no node of the pass needs it any more, for autograd
adds its gradient up after the last of them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

import torch
from torch import Tensor, nn, optim

from tenure._account import taken
from tenure._cuda_blocks import taken_by
from tenure._errors import PagingError
from tenure._registries import shrinkables
from tenure._text import format_bytes, parse_bytes
from tenure._torch.optimizers import before_post_hooks, pre_hooks_of, unhooked_step
from tenure._torch.patches import Patch
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
from ._host_buffers import HostBuffers
from ._link import Link
from ._memory import Arrangement
from ._page import RESIDENT, in_place_of
from ._pager import Pager, after_captures, check_capture
from ._pass import Forward
from ._plan import DISK, PCIE_4, PagingPlan, Planned, make_plan, planned_as, speed_of
from ._report import PagingReport, make_report
from ._sharded import ShardedModel, shard
from ._tensors import HostTensor, TensorTable, Unit
from ._training import TrainingEngine, TrainingPager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PagedModel:
    """A model that is paged, until ``unpage()`` or the end of ``with handle:``.

    Attributes:
        model: the model, the same object as before.
        plan: how it is paged.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PagingPlan,
        pager: Pager,
        attached: Attached,
    ) -> None:
        self.model = model
        self.plan = plan
        self._pager = pager
        self._engine = pager.engine
        self._engine.serve(model)
        # A collection may come while a graph is captured, which closing would break
        close = self._engine.close
        self._collected = weakref.finalize(pager, after_captures, self._engine.device, close)
        self._collected.atexit = False
        self._attached = attached
        # A program that pages for good has no block which an error leaves, and may keep no handle.
        _pagers.add(pager)
        self._end_hooks = [hook.last_while(pager) for hook in _hooks]

    @property
    def closed(self) -> bool:
        """Whether the model is unpaged."""
        return self._engine.closed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def unpage(self) -> None:
        """End the paging; the model is on the host again, unchanged. Nothing the second time.

        Stops the host until the device has nothing left to do.

        Raises:
            PagingError: a graph is being captured; the model is still paged.
        """
        if not self.closed:
            device = self._engine.device
            check_capture(device, f"unpage() was called of {self!r}", waits=True)
        shrinkables.discard(self._pager)
        self._pager.close(self._undo)

    def _undo(self) -> None:
        for end_hook in self._end_hooks:
            end_hook()
        self._attached.undo()
        self._engine.close()
        self._collected.detach()

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None
    ) -> AbstractContextManager[None]:
        """Return a block for the last backward pass of a step, during which the optimizer steps.

        Each unit's parameters are stepped as soon as their gradients are on the host. The result is
        that of ``optimizer.step()`` after the block, and its hooks run once, when the block ends. A
        hook that runs before the step may look at all gradients, so with one the step begins only
        when the backward pass is over.

        Args:
            optimizer: one of torch's that treats each parameter alone, as all but LBFGS do.
            max_norm: clip the gradients to this norm before. For that all must be there, so the
                step begins when the backward pass is over.

        Raises:
            PagingError: the optimizer is of another kind, or the model is not paged for training.
        """
        if self.closed or not isinstance(self._engine, TrainingEngine):
            raise PagingError(
                f"optimizer_step() was called of {self!r}, which is not paged for training. Page "
                "it with training=True."
            )
        checked = checked_optimizer(optimizer)
        if max_norm is not None or needs_all_gradients(checked):
            return stepped_after(checked, max_norm)
        prepare = self._engine.wait_for_step
        return stepping(checked, self._engine.units, prepare)

    def report(self) -> PagingReport:
        """Report the bytes that the last pass moved, its waits, and its share of the limit.

        Stops the host until that pass has ended.

        Raises:
            PagingError: no pass has ended, or the model is unpaged, or a graph is being captured.
        """
        if self.closed:
            raise PagingError(f"{self!r} has nothing to report: it is unpaged.")
        device = self._engine.device
        check_capture(device, f"report() was called of {self!r}", waits=True)
        return make_report(self._engine, self.plan.weight_bytes)

    def __enter__(self) -> Self:
        """Return the handle itself.

        Raises:
            PagingError: the model is unpaged.
        """
        if self.closed:
            raise PagingError(f"{self!r} was entered, but it is unpaged. Page the model again.")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Unpage the model; an exception of the block goes on unmasked.

        One about tensors on two devices gets a note, if a parameter was read outside of a forward.
        """
        self._pager.explain(exc)
        self.unpage()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            PagingError: always.
        """
        raise PagingError(
            f"{self!r} can't be pickled or copied: it holds streams and memory of the device. "
            "Pickle or copy its model, which gives a plain model, and page that."
        )

    def __repr__(self) -> str:
        allocated_bytes = self._engine.taken.allocated_bytes
        state = "unpaged" if self.closed else f"{format_bytes(allocated_bytes)} in use"
        return f"<PagedModel {self.plan.model} on {self.plan.device}, {state}>"


def _explaining(before: Any) -> Any:
    """Return a hook for what ends a program, or a thread, which gets its error as an attribute."""

    def explain(*given: Any) -> None:
        error = given[0].exc_value if len(given) == 1 else given[1]
        for pager in list(_pagers):
            pager.explain(error)
        before(*given)

    return explain


_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()
_hooks = [Patch(module, {"excepthook": _explaining}) for module in (sys, threading)]


_TOGETHER = (optim.LBFGS,)
"""Those whose step looks at all parameters at once."""


@contextmanager
def stepping(
    optimizer: optim.Optimizer, units: Sequence[Unit], prepare: Callable[[optim.Optimizer], object]
) -> Iterator[None]:
    """Open a block for a backward pass that steps a unit as soon as all its gradients are here.

    If it ends without an error, the rest is stepped, by the one call of ``optimizer.step()``, which
    runs the hooks of a step.

    Args:
        optimizer: the optimizer.
        units: the model's.
        prepare: waits until the optimizer may write; called before each part.
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # By the `id` of each parameter, those of its unit
    units_of: dict[int, set[int]] = {}
    stepped: set[int] = set()

    @contextmanager
    def only(known: set[int]) -> Iterator[None]:
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in known]
            yield
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def arrived(parameter: Tensor) -> None:
        if id(parameter) in stepped:
            raise PagingError(
                "A second backward pass has added to gradients that optimizer_step() has stepped "
                "with already. Put the block around the last backward pass of a step alone."
            )
        left.discard(id(parameter))
        together = units_of[id(parameter)]
        if left.isdisjoint(together):
            stepped.update(together)
            prepare(optimizer)
            # as outside of a backward pass, where hooks of gradients run with them or without
            with only(together), torch.enable_grad():
                unhooked_step(optimizer)

    with ExitStack() as hooks:
        for unit in units:
            asking = [each.tensor for each in unit.tensors if each.tensor.requires_grad]
            asking = [tensor for tensor in asking if id(tensor) in own]
            together = {id(tensor) for tensor in asking}
            units_of |= dict.fromkeys(together, together)
            for tensor in asking:
                hooks.callback(tensor.register_post_accumulate_grad_hook(arrived).remove)
        left = set(units_of)
        yield
    rest = {id(p) for group in optimizer.param_groups for p in group["params"]} - stepped
    with ExitStack() as narrowed:
        narrowed.enter_context(only(rest))
        # Hooks that run after the step see all parameters in the optimizer.
        with before_post_hooks(optimizer, narrowed.close):
            optimizer.step()


@contextmanager
def stepped_after(optimizer: optim.Optimizer, max_norm: float | None) -> Iterator[None]:
    """Open a block after which all parameters are stepped; with a norm, clip before."""
    yield
    if max_norm is not None:
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], max_norm
        )
    optimizer.step()


def needs_all_gradients(optimizer: optim.Optimizer) -> bool:
    """Return whether a hook runs before a step: it may look at any gradient, or refuse the step.

    Hooks of paged models look at none.
    """
    home = __name__.rpartition(".")[0]
    hooks = pre_hooks_of(optimizer)
    return any(not str(getattr(hook, "__module__", "")).startswith(home) for hook in hooks)


def checked_optimizer(optimizer: object) -> optim.Optimizer:
    """Return an optimizer that treats each parameter alone.

    Raises:
        PagingError: it does not, or nobody knows.
    """
    cls = type(optimizer)
    home = cls.__module__.partition(".")
    is_torchs = home[0] == "torch" and not isinstance(optimizer, _TOGETHER)
    if not isinstance(optimizer, optim.Optimizer) or not is_torchs:
        raise PagingError(
            f"optimizer_step() was given {cls.__name__}, which may look at several parameters at "
            "once; only what steps each parameter alone can step a part of them. Call its step() "
            "after the backward pass."
        )
    return optimizer


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
