"""Training: graphs lead to the parameters on the host, and a backward pass fetches weights anew.

A parameter leads to `_Arrive`, on the host, and that to `_PageIn`, on the device, whose output is
what a forward is shown. So everything that torch does for a parameter it does for that of the host:
its hooks, its ``grad``, sums of several gradients, ``autograd.grad``.

Nodes save tensors for the backward pass. What lies in a page, which may be a view of a weight, is
kept as its unit and its form, so that it holds no bytes and is fetched again. All else goes to the
hooks around, of a checkpoint or of the user's, and where there are none to the host, if that is
wanted, or it is kept as it is. What was written since raises, as in a plain model: torch asks no
versions where hooks are, so they are asked here.

A backward pass runs where autograd runs it, as a rule on a thread of its own for the device, and
torch tells nobody that it begins: it does where a node first asks for a weight. It is inside as a
forward is: until it ends, or fails, no other thread is.

Invariant: nothing behind `_Arrive`, no hook and no sum, reads a gradient before its copy is there.
A gradient keeps its memory on the device until its copy is over, by the device's own time; at most
those of two units are under way. The host waits for a copy where it is read first. From the end of
a backward pass to the begin of the next forward no copy reads the host's weights, so that whoever
steps them, through whatever reference, races with none.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import suppress
from functools import partial
from threading import RLock, get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tenure._cuda_blocks import up_to
from tenure._errors import PagingError
from tenure._oom import oom_info
from tenure._registries import NamedTensor
from tenure._text import describe, describe_tensor
from tenure._torch.autograd import (
    at_end_of_backward,
    hooks_of_saved,
    is_batch_of_gradients,
    is_in_engine,
    is_of_checkpoint,
    is_running_node,
    is_transformed,
    running_task,
)
from tenure._torch.compiler import never_compiled
from tenure._torch.lending import lent_to, note_write
from tenure._torch.optimizers import bring_scale_home, wait_while
from tenure._torch.quiet import aside, aside_with_subclasses, quietly, without_functions
from tenure._torch.storages import byte_range
from tenure._torch.writes import version_of

from ._activations import ACTIVATIONS, LEAST_BYTES, Activations, HostSlabs, Moved
from ._engine import Engine
from ._files import HostStore
from ._link import Link
from ._page import Page, share_attributes
from ._pager import Pager, asking, check_capture
from ._pass import Forward, Pass
from ._tensors import UNIT_ALIGNMENT_BYTES, HostTensor, Unit, is_plain, made_around

GRADIENTS = "paged: gradients"
"""The name of this memory in reports, where no gradient that is in use lies in it."""
MOST_UNITS = 2
"""Of so many units gradients are under way at most, and one that is computed."""


class Homeward:
    """Takes gradients to the host.

    Args:
        link: the streams of the device.
        memory: the host memory that they are copied to.
    """

    def __init__(self, link: Link, memory: HostSlabs) -> None:
        self._link, self._memory = link, memory
        # Of each unit: gradients, the streams that they were computed on, and the copies' events
        self._under_way: dict[Unit, list[tuple[Tensor, Any, Any]]] = {}

    def alias(self, host: HostTensor, shown: Tensor) -> Tensor:
        """Return the alias of a weight that forward gets: bytes and versions of ``shown``."""
        # The event of the copy that `_PageIn` begins, for `_Arrive` to wait for
        sent: list[Any] = []
        # Also where no graph is recorded now: what is read there may be used where one is.
        with quietly(), torch.inference_mode(False), torch.enable_grad():
            arrive: Any = _Arrive.apply
            page_in: Any = _PageIn.apply
            alias: Any = page_in(arrive(host.tensor, self, sent), self, sent, host, (shown,))
        share_attributes(shown, alias)
        # What `isinstance(weight, nn.Parameter)` asks a tensor of another class.
        alias._is_param = True
        return alias  # type: ignore[no-any-return]

    def send(self, host: HostTensor, gradient: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy a gradient; the tensor that it will be, and the event from when on it is.

        Args:
            host: the parameter that it is of.
            gradient: on the device, of the parameter's shape and dtype.

        Returns:
            The tensor on the host, and None for one that is there already, such as a sparse one.
        """
        if not is_plain(gradient) or host.unit is None:
            with aside():
                return gradient.to("cpu"), None
        self._let_others_arrive(host.unit)
        stream = self._link.current()
        with aside():
            there = self._place_for(host, host.unit)
            if gradient.stride() != there.stride():
                # A copy that also reorders would stop the host.
                form = gradient.size(), there.stride()
                gradient = gradient.new_empty_strided(*form).copy_(gradient)
            # Synchronization strategy: the kernels that compute it run on this stream.
            event = self._link.page_out([(there, gradient)], [self._link.mark(stream)])
        self._under_way.setdefault(host.unit, []).append((gradient, stream, event))
        if torch.is_anomaly_enabled():
            # It looks at what each node returns.
            self.wait(event)
        return there, event

    def wait(self, event: Any) -> None:
        """Stop the host until a copy is over."""
        # Synchronization strategy: from here on hooks, sums and optimizers read the host's bytes.
        self._link.let_host(event)

    def end(self) -> None:
        """Note that this pass sends no more gradients."""
        while self._under_way:
            self._let_arrive(next(iter(self._under_way)))

    def close(self) -> None:
        """Let go of it all."""
        self._under_way.clear()

    def _place_for(self, host: HostTensor, unit: Unit) -> Tensor:
        """Return a tensor for a gradient, with the parameter's shape, dtype and dense strides."""
        original = host.tensor
        asking = (each.tensor.nbytes for each in unit.tensors if each.tensor.requires_grad)
        unit_bytes = sum(up_to(n_bytes, UNIT_ALIGNMENT_BYTES) for n_bytes in asking)
        storage = self._memory.take(original.nbytes, unit_bytes).memory.untyped_storage()
        # With these autograd takes it for the parameter's `grad` as it is, and copies none.
        strides = torch.empty_like(original, device="meta").stride()
        made: Any = torch.empty(0, dtype=original.dtype, device="cpu")
        return made.set_(storage, 0, original.size(), strides)  # type: ignore[no-any-return]

    def _let_others_arrive(self, unit: Unit) -> None:
        if unit not in self._under_way:
            while len(self._under_way) >= MOST_UNITS:
                self._let_arrive(next(iter(self._under_way)))

    def _let_arrive(self, unit: Unit) -> None:
        """Give the memory of a unit's gradients back to the streams that they were computed on."""
        # Synchronization strategy: who gets this memory next writes it on the same stream, after
        # the wait for the copy that reads it. The host does not wait: it would launch nothing then.
        # Kept until then, or another thread could get this memory before the wait.
        under_way = self._under_way.pop(unit)
        last = {stream.stream_id: (stream, event) for _, stream, event in under_way}
        for stream, event in last.values():
            self._link.let_compute(stream, event)


class _Arrive(Function):
    """The same tensor; its gradient is there when it passes."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, homeward: Homeward, sent: list[Any]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.homeward, ctx.sent = homeward, sent
        ctx.set_materialize_grads(False)
        return host.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for event in ctx.sent:
            ctx.homeward.wait(event)
        return gradient, None, None


class _PageIn(Function):
    """The weight on the device; its gradient is on its way when it passes."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        _: Tensor,
        homeward: Homeward,
        sent: list[Any],
        host: HostTensor,
        shown: tuple[Tensor],
    ) -> Tensor:
        ctx.homeward, ctx.sent, ctx.host = homeward, sent, host
        ctx.set_materialize_grads(False)
        # No view: one of a function's own could not be used after a write in place, as constraints
        # of weights are. It counts writes with the tensor that is shown.
        return shown[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A gradient that is to be differentiated goes by an operation that can be; and so do those
        # of several outputs at once, which are one tensor of vmap's.
        if gradient is None or torch.is_grad_enabled() or is_batch_of_gradients(gradient):
            there = None if gradient is None else gradient.cpu()
        else:
            there, event = ctx.homeward.send(ctx.host, gradient)
            ctx.sent[:] = [] if event is None else [event]
        return there, None, None, None, None


class TrainingEngine(Engine):
    """Do as an engine does.

    Args:
        link: the streams of the device.
        store: the host bytes.
        units: as of an engine.
        max_ahead: as of an engine.
        make: makes host memory for gradients and activations, of so many bytes.
        moves_activations: whether what graphs save beside weights goes to the host.

    Attributes:
        homeward: takes gradients to the host.
        activations: takes what graphs save beside weights there; None where that stays.
    """

    trains = True

    def __init__(
        self,
        link: Link,
        store: HostStore,
        units: list[Unit],
        max_ahead: int | None,
        make: Callable[[int], Any],
        *,
        moves_activations: bool = False,
    ) -> None:
        super().__init__(link, store, units, max_ahead)
        # Of gradients, and of activations
        self._slabs = HostSlabs(make, GRADIENTS), HostSlabs(make, ACTIVATIONS, LEAST_BYTES)
        self.homeward = Homeward(link, self._slabs[0])
        self.activations: Activations | None = None
        if moves_activations:
            self.activations = Activations(link, self._slabs[1])
        # after a step as well: in it a closure runs the model, which copies what is noted before
        registering = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        self._end_watching = [_with_steps(self, register) for register in registering]
        self._end_waiting = wait_while(self)

    @property
    def host_bytes(self) -> int:
        """Host memory that holds the weights, their gradients, and activations that are away."""
        return super().host_bytes + sum(slabs.n_bytes for slabs in self._slabs)

    def begin(self, now: Pass) -> None:
        """Do as an engine does."""
        self.room.written_in_graphs.clear()
        super().begin(now)

    def end(self) -> None:
        """End a pass as an engine does; fetch nothing if no backward pass follows."""
        super().end()
        for page in self.room.pages.values():
            self.room.written_in_graphs += page.end_aliases()
        if not self._now.records:
            self.homeward.end()
            self.wait_for_all_copies()

    def wait_for_step(self, optimizer: Optimizer) -> None:
        """Stop the host until no copy reads what an optimizer is to write, and its scale is here.

        A forward that no backward pass follows has fetched for one.
        """
        self.wait_for_all_copies()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # Fused optimizers raise no version on the CPU.
                    note_write(parameter)
        bring_scale_home(optimizer)

    def close(self) -> None:
        """Do as an engine does."""
        for end in self._end_watching:
            end()
        self._end_waiting()
        super().close()
        self.homeward.close()
        if self.activations is not None:
            self.activations.close()
        for slabs in self._slabs:
            slabs.close()

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the tensors of an engine, and the host memory for gradients and activations."""
        yield from super().named_tensors()
        for slabs in self._slabs:
            yield from slabs.named_tensors()


def _with_steps(engine: TrainingEngine, register: Callable[..., Any]) -> Callable[[], object]:
    """Have optimizers wait as of ``wait_for_step``; what ends that."""
    known = weakref.WeakMethod(engine.wait_for_step)

    def wait(optimizer: Optimizer, *_: object) -> None:
        wait_for_step = known()
        if wait_for_step is not None:
            wait_for_step(optimizer)

    return weakref.finalize(engine, register(wait).remove)


Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
Packed = Callable[[], Tensor]
"""A node keeps it in place of a tensor; it gives the tensor back."""
_NOTHING = torch.empty(0, device="cpu")
"""What hooks of a checkpoint get in the place of a weight."""


class TrainingPager(Pager):
    """As of a pager.

    Args:
        engine: the pages.
        hosts: the model's tensors.
    """

    engine: TrainingEngine

    def __init__(self, engine: TrainingEngine, hosts: Collection[HostTensor]) -> None:
        super().__init__(engine, hosts)
        self._activations = engine.activations
        # Of the last pass that was recorded: the next backward pass is most likely its.
        self._recorded: Hashable = None
        # The backward passes of autograd's that the one that is inside is for.
        self._tasks: set[int] = set()
        self._joining = RLock()
        # Read by forwards in a checkpoint around no module: none is called to recompute it.
        self._checkpointed: set[HostTensor] = set()

    def explain(self, error: BaseException | None) -> None:
        """Add a note as a pager does, or to an out-of-memory error of the device."""
        super().explain(error)
        if self._closed or error is None:
            return
        device, info = self.engine.device, oom_info(error)
        if info is not None and info.device == str(device):
            moved = "" if self._activations else ', pass activations="host"'
            error.add_note(
                f"A model is trained that is paged to {device}. Activations and gradients come on "
                f"top of its budget: lower budget={moved}, or run smaller batches."
            )

    def enter(self, forward: Forward, token: object, units: list[Unit], module: nn.Module) -> bool:
        """Enter as a pager does; a forward that a node runs is part of its backward pass."""
        if self._pass is None and is_running_node():
            self._backward_pass()
        if not super().enter(forward, token, units, module):
            return False
        now = self._pass
        if now is not None and torch.is_grad_enabled():
            # Also here, not only in the outermost forward: a checkpoint around a part of the model
            # has hooks that would keep its weights.
            end = self._watch()
            if end is not None:
                self.on_leave(end)
        return True

    @never_compiled
    def show(self, host: HostTensor) -> Tensor:
        """Show as a pager does; if a graph is recorded, weights that require grad join it."""
        is_checkpointed, is_inside = is_of_checkpoint(hooks_of_saved()), self.is_inside
        if is_checkpointed and not is_inside and host in self._checkpointed and is_running_node():
            assert host.unit is not None
            page = self._page_of(host.unit, self._backward_pass())
            return self._in_graph(page, host) if host.tensor.requires_grad else page.shown(host)
        shown = super().show(host)
        now = self._pass
        if now is None or host.unit is None or not is_inside or host in now.assigned:
            return shown
        if is_checkpointed:
            self._checkpointed.add(host)
        # What is read without gradients in a forward that has them may be used with them.
        if not (host.tensor.requires_grad and (now.records or torch.is_grad_enabled())):
            return shown
        return self._in_graph(self.engine.room.pages[host.unit], host)

    def _in_graph(self, page: Page, host: HostTensor) -> Tensor:
        return page.alias(host, partial(self.engine.homeward.alias, host))

    def _begin(self, now: Pass, module: nn.Module) -> None:
        now.records = torch.is_grad_enabled()
        if self._activations is not None:
            self._activations.note_stream()
        super()._begin(now, module)

    def _check_gradients(self, module: nn.Module) -> None:
        """Refuse a pass with gradients on, not all of which could get to their parameters."""
        name = type(module).__name__
        if is_transformed():
            raise PagingError(
                f"{name} is paged for training and was called inside a transform of torch.func, "
                "whose gradients don't pass through weights that are paged. Use backward() or "
                "torch.autograd.grad(), or unpage() first."
            )
        whole = [host.name for host in asking(self._hosts) if host.unit is None]
        if whole:
            raise PagingError(
                f"{whole[0]!r} asks for gradients and can't be trained while it is paged: it is a "
                "tensor subclass, or empty, and its gradients would not get home. Freeze it with "
                "requires_grad_(False), or unpage() first."
            )

    def _end(self, now: Pass, *, completed: bool) -> None:
        if now.records:
            self._recorded = now.kind
            self.engine.access_order.expect(_backward_of(now.kind), now)
        super()._end(now, completed=completed)
        written = [repr(host.name) for host in self.engine.room.written_in_graphs]
        if written and completed:
            raise PagingError(
                f"{written[0]} was written in place with gradients on, in the forward of "
                f"{now.name}: torch refuses that for a parameter that asks for gradients, as they "
                "would not be its own. Write it under torch.no_grad()."
            )

    def _wake_backward(self) -> None:
        """Have a backward pass begin; outside of one, somebody looks at what a node has saved."""
        if is_running_node():
            self._backward_pass()
        elif self._closed:
            raise _unpaged()

    def _backward_pass(self) -> Pass:
        """Return the pass that a node of autograd runs in; where there is none, it begins."""
        check_capture(self.engine.device, "A backward pass needs weights that are paged")
        with self._joining:
            now = self._pass
            if now is not None and (now.thread == get_ident() or _waits_for_nodes(now)):
                if now.is_backward:
                    self._join(now)
                return now
        now = Pass(self.engine.access_order, _backward_of(self._recorded), "A backward pass")
        now.is_backward = True
        try:
            if not self._comes_in(now):
                raise _unpaged()
            self._tasks.clear()
            self._join(now)
            self.engine.begin(now)
            self.engine.prefetch()
        except BaseException:
            self._turn.release(now)
            raise
        return now

    def _join(self, now: Pass) -> None:
        """Let the pass last as long as the one of autograd that runs here, or those before it.

        One thread runs the nodes of all of them in turn, also where several threads call them.
        """
        task = running_task()
        if task not in self._tasks:
            at_end_of_backward(_Ending(self, now, task))
            self._tasks.add(task)

    def end_backward(self, now: Pass, task: int, *, completed: bool) -> None:
        """End a backward pass; a second call does nothing."""
        # It may be told on another thread than that of the nodes, where the next one begins.
        with self._joining:
            if self._pass is not now or task not in self._tasks:
                return
            self._tasks.discard(task)
            if self._tasks:
                return
            try:
                self._abandon(now)
                now.is_backward = False
                if self._activations is not None:
                    self._activations.end()
                self._end(now, completed=completed)
            finally:
                self._turn.release(now)

    def _watch(self) -> Callable[[], object] | None:
        """Stand before all other hooks of this thread from now on.

        Returns:
            What ends that; None where these hooks were the first already.
        """
        around = hooks_of_saved()
        if around is not None and getattr(around[0], "func", None) == self._pack:
            return None
        hooks = saved_tensors_hooks(partial(self._pack, around), self._unpack)
        hooks.__enter__()
        return hooks.__exit__

    def _pack(self, around: Hooks | None, tensor: Tensor) -> Packed:
        with without_functions():
            weight = self._weight(tensor)
        if weight is None and hasattr(type(tensor), "__tensor_flatten__"):
            weight = self._parts_of(tensor)
        if around is not None:
            pack, unpack = around
            if weight is None:
                return partial(unpack, pack(tensor))
            if is_of_checkpoint(around):
                return partial(_recomputed, partial(unpack, pack(_NOTHING)), weight)
        if weight is not None:
            return weight
        if self._activations is not None:
            with without_functions():
                moved = self._activations.take(tensor)
            if moved is not None:
                return partial(self._back, moved)
        # Not itself: an output that its own node keeps would keep the node, and neither ever goes.
        with quietly() if type(tensor) is Tensor else without_functions():
            kept = tensor.detach()
        return partial(_unwritten, kept, version_of(kept))

    def _unpack(self, packed: Packed) -> Tensor:
        """Return a saved tensor, as it was.

        Raises:
            RuntimeError: it was written since.
            PagingError: the model is unpaged, or there is no room for the weight.
        """
        if torch.is_grad_enabled() and is_running_node():
            # A backward pass that is differentiated makes a graph of its own, which must not keep
            # weights either. The engine takes the hooks back when the node that asks has run; who
            # looks at what a node saved, outside of one, would be left with them.
            self._watch()
        return packed()

    def _weight(self, tensor: Tensor) -> Packed | None:
        """Return a tensor as part of a page; None if it lies in none."""
        lent = lent_to(tensor)
        unit = None if lent is None else lent.lender
        page = self.engine.room.pages.get(unit) if isinstance(unit, Unit) else None
        if lent is None or page is None or not page.lends(lent) or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        form = offset, tensor.size(), tensor.stride()
        hosts = _hosts_at(page.unit, offset * tensor.element_size())
        n_writes = _n_writes(page, hosts)
        weight = partial(self._weight_back, page.unit, hosts, n_writes, tensor.dtype, form)
        return partial(_conjugate, weight) if tensor.is_conj() else weight

    def _weight_back(
        self,
        unit: Unit,
        hosts: list[HostTensor],
        expected: int,
        dtype: torch.dtype,
        form: tuple[Any, ...],
    ) -> Tensor:
        page = self._page_of(unit, self._backward_pass())
        n_writes = _n_writes(page, hosts)
        if n_writes != expected:
            _refuse(" or ".join(repr(host.name) for host in hosts), n_writes, expected)
        return page.view(dtype, *form)

    def _parts_of(self, tensor: Tensor) -> Packed | None:
        """Return a tensor that is made of parts of pages, or a view of one; None if another."""
        parts: list[Packed] = []

        def take(part: Tensor) -> Tensor:
            if not part.numel():
                return part
            weight = self._weight(part)
            if weight is None:
                raise LookupError
            parts.append(weight)
            # Its form alone, which holds no bytes
            return torch.empty_like(part, device="meta")

        # A class may refuse anything, in any way; then it is kept, with the bytes that it is of.
        with suppress(Exception), aside_with_subclasses():
            return partial(_composed_back, made_around(tensor, take), parts)
        return None

    def _back(self, moved: Moved) -> Tensor:
        assert self._activations is not None
        n_writes = version_of(moved.away.writes)
        if n_writes != moved.away.n_writes:
            size, device = moved.form[1], moved.away.writes.device
            n_bytes = size.numel() * moved.dtype.itemsize
            _refuse(describe(moved.dtype, size, device, n_bytes), n_writes, moved.away.n_writes)
        self._wake_backward()
        return self._activations.give(moved)


class _Ending:
    """Tells that a backward pass is over: autograd calls it, or lets go of it where it failed."""

    def __init__(self, pager: TrainingPager, now: Pass, task: int) -> None:
        self._pager, self._now, self._task = pager, now, task

    def __call__(self) -> None:
        self._pager.end_backward(self._now, self._task, completed=True)

    def __del__(self) -> None:
        self._pager.end_backward(self._now, self._task, completed=False)


def _unpaged() -> PagingError:
    return PagingError(
        "A backward pass needs weights of a model that was unpaged since its forward. Call "
        "backward() before unpage()."
    )


def _backward_of(kind: Hashable) -> Hashable:
    return "backward", kind


def _waits_for_nodes(now: Pass) -> bool:
    """Return whether the pass's thread waits in autograd's engine for nodes elsewhere."""
    return is_in_engine(sys._current_frames().get(now.thread))


def _recomputed(recompute: Packed, weight: Packed) -> Tensor:
    # A checkpoint recomputes all of its modules when a node first asks for what it saved. A node
    # that had its weight by then would hold it beside each of theirs.
    recompute()
    return weight()


def _composed_back(like: Tensor, parts: list[Packed]) -> Tensor:
    found = (part() for part in parts)
    with aside_with_subclasses():
        return made_around(like, lambda part: next(found) if part.numel() else part)


def _conjugate(packed: Packed) -> Tensor:
    with quietly():
        return packed().conj()


def _unwritten(kept: Tensor, expected: int | None) -> Tensor:
    n_writes = version_of(kept)
    if n_writes != expected:
        _refuse(describe_tensor(kept), n_writes, expected)
    return kept


def _hosts_at(unit: Unit, at_bytes: int) -> list[HostTensor]:
    """Return the tensors of a unit that lie over one of its bytes."""
    found = []
    for host in unit.tensors:
        start, end = byte_range(host.tensor)
        if host.at_bytes <= at_bytes < host.at_bytes + end - start:
            found.append(host)
    return found


def _n_writes(page: Page, hosts: list[HostTensor]) -> int:
    # `.data` that is set raises no version.
    return sum(page.version_of(host) + host.n_given for host in hosts)


def _refuse(what: str, n_writes: int | None, expected: int | None) -> NoReturn:
    # torch's own words first: programs and people know them.
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} is at version {n_writes}; expected version {expected} instead. It was "
        "saved by the forward of a paged model. Run backward() before it is written, or clone() it "
        "in the forward."
    )
