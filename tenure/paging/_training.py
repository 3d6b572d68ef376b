"""Training: gradients go from the weights on the device to the parameters on the host.

A parameter leads to `_Arrive`, on the host, and that to `_PageIn`, on the device, whose output is
what a forward is shown. So everything that torch does for a parameter it does for that of the host:
its hooks, its ``grad``, sums of several gradients, ``autograd.grad``.

Invariant: nothing behind `_Arrive`, no hook and no sum, reads a gradient before its copy is there.
A gradient keeps its memory on the device until its copy is over, by the device's own time; at most
those of two units are under way. The host waits for a copy where it is read first. From the end of
a backward pass to the begin of the next forward no copy reads the host's weights, so that whoever
steps them, through whatever reference, races with none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tenure._cuda_blocks import up_to
from tenure._registries import NamedTensor
from tenure._torch.autograd import is_batch_of_gradients
from tenure._torch.optimizers import bring_scale_home, wait_while
from tenure._torch.quiet import aside, quietly

from ._activations import ACTIVATIONS, LEAST_BYTES, Activations, HostSlabs
from ._engine import Engine
from ._files import HostStore
from ._link import Link
from ._page import share_attributes
from ._pass import Pass
from ._tensors import UNIT_ALIGNMENT_BYTES, HostTensor, Unit, is_plain

GRADIENTS = "paged: gradients"
"""The name of this memory in reports, where no gradient that is in use lies in it."""
MOST_UNITS = 2
"""Of so many units gradients are under way at most, and one that is computed."""


class _Sent(NamedTuple):
    gradient: Tensor
    stream: Any
    event: Any


class Homeward:
    """Takes gradients to the host.

    Args:
        link: the streams of the device.
        memory: the host memory that they are copied to.
    """

    def __init__(self, link: Link, memory: HostSlabs) -> None:
        self._link, self._memory = link, memory
        self._under_way: dict[Unit | None, list[_Sent]] = {}

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
        self._under_way.setdefault(host.unit, []).append(_Sent(gradient, stream, event))
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

    def _let_arrive(self, unit: Unit | None) -> None:
        """Give the memory of a unit's gradients back to the streams that they were computed on."""
        # Synchronization strategy: who gets this memory next writes it on the same stream, after
        # the wait for the copy that reads it. The host does not wait: it would launch nothing then.
        # Kept until then, or another thread could get this memory before the wait.
        under_way = self._under_way.pop(unit)
        last = {sent.stream.stream_id: sent for sent in under_way}
        for sent in last.values():
            self._link.let_compute(sent.stream, sent.event)


class Route:
    """One weight on the device, and what waits for its gradients.

    Args:
        host: the weight on the host.
        homeward: takes gradients there.
    """

    __slots__ = ("_event", "_homeward", "_host")

    def __init__(self, host: HostTensor, homeward: Homeward) -> None:
        self._host, self._homeward = host, homeward
        self._event: Any = None

    def alias(self, shown: Tensor) -> Tensor:
        """Return the alias that forward gets: bytes and versions of ``shown``, in a graph."""
        # Also where no graph is recorded now: what is read there may be used where one is.
        with quietly(), torch.inference_mode(False), torch.enable_grad():
            arrive: Any = _Arrive.apply
            page_in: Any = _PageIn.apply
            alias: Any = page_in(arrive(self._host.tensor, self), self, (shown,))
        share_attributes(shown, alias)
        # What `isinstance(weight, nn.Parameter)` asks a tensor of another class.
        alias._is_param = True
        return alias  # type: ignore[no-any-return]

    def send(self, gradient: Tensor) -> Tensor:
        """Begin to copy a gradient to the host; what it will be there."""
        there, self._event = self._homeward.send(self._host, gradient)
        if torch.is_anomaly_enabled():
            # It looks at what each node returns.
            self.wait()
        return there

    def wait(self) -> None:
        """Stop the host until the gradient that was sent is there."""
        if self._event is not None:
            self._homeward.wait(self._event)


class _Arrive(Function):
    """The same tensor; its gradient is there when it passes."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, route: Route) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.route = route
        ctx.set_materialize_grads(False)
        return host.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.route.wait()
        return gradient, None


class _PageIn(Function):
    """The weight on the device; its gradient is on its way when it passes."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, route: Route, shown: tuple[Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.route = route
        ctx.set_materialize_grads(False)
        # No view: one of a function's own could not be used after a write in place, as constraints
        # of weights are. It counts writes with the tensor that is shown.
        return shown[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A gradient that is to be differentiated goes by an operation that can be; and so do those
        # of several outputs at once, which are one tensor of vmap's.
        if gradient is None or torch.is_grad_enabled() or is_batch_of_gradients(gradient):
            return None if gradient is None else gradient.cpu(), None, None
        return ctx.route.send(gradient), None, None


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
        self._end_watching = _before_steps(self)
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
            self._copies.wait_for_all_copies()

    def wait_for_step(self, optimizer: Optimizer) -> None:
        """Stop the host until no copy reads what an optimizer is to write, and its scale is here.

        A forward that no backward pass follows has fetched for one.
        """
        self._copies.wait_for_all_copies()
        bring_scale_home(optimizer)

    def close(self) -> None:
        """Do as an engine does."""
        self._end_watching()
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


def _before_steps(engine: TrainingEngine) -> Callable[[], object]:
    """Have optimizers wait as of ``wait_for_step``; what ends that."""
    known = weakref.WeakMethod(engine.wait_for_step)

    def wait(optimizer: Optimizer, *_: object) -> None:
        wait_for_step = known()
        if wait_for_step is not None:
            wait_for_step(optimizer)

    return weakref.finalize(engine, register_optimizer_step_pre_hook(wait).remove)
