"""Work whose memory is told: what it may reach, and the one run of it on tensors without data.

Invariant: after `Work.observe` everything that the work reaches is as before, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tenure._containers import tensors_in
from tenure._errors import AdaptiveUsageError, PredictionError
from tenure._heap import collector_paused
from tenure._torch import cpu_allocator, gradient_sums
from tenure._torch.autograd import BACKWARD_TWICE
from tenure._torch.compiler import is_compiled
from tenure._torch.fakes import is_fake, unrecognised
from tenure._torch.optimizers import stepping_fakes
from tenure._torch.resizing import tell, tell_no_more
from tenure._torch.sharding import Shards, offloading, shapes_found_unseen
from tenure.scopes import persist

from .._interrupts import Interrupts
from .._ranks import has_other_replicas, kept_apart
from .._reachable import Reachable
from .._undo import AllOf, ModuleState, RngState, modules_below
from ._kept import Containers, holders_in
from ._left import FakesLeft
from ._lent import check_between_passes, gradients_kept, lent_to_fakes, mode_for, parts_of
from ._observer import Observer
from ._target import target_of

_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# what torch says where Python code wants the values of a tensor
_TWO_THREADS = ("in_kernel_invocation", "False, True", "True, False")
_CONVERTS = "_apply(): Couldn't swap"
_NO_DATA = ("data is not allocated", "is not supported for tensor subclasses")


class Work:
    """A function, what it is given, and the tensors that it may reach.

    Attributes:
        may_step: whether an optimizer may step in it.
        leaves_fakes: whether something has kept a tensor without data, so that nothing may train.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        optimizer: Optimizer | None,
        device: torch.device | str | None = None,
    ) -> None:
        self.fn, self.args, self.kwargs, self.optimizer = fn, args, kwargs, optimizer
        reached = Reachable(fn)
        given = [value for value in (fn, *args, *kwargs.values()) if isinstance(value, nn.Module)]
        self.roots = reached.modules
        self.names: dict[int, str] = {}
        self.modules = modules_below([*reached.modules.values(), *given])
        self.generators = reached.all_generators(self.modules)
        single = len(reached.modules) == 1
        for name, module in reached.modules.items():
            for below, each in module.named_modules(prefix="" if single else name):
                self.names.setdefault(id(each), below or name)
        self.parameters = _unique(
            [p for module in self.modules for p in module._parameters.values() if p is not None]
            + reached.captured()
        )
        self.buffers = _unique(
            b for module in self.modules for b in module._buffers.values() if b is not None
        )
        self.state = _OptimizerState(optimizer)
        self.parameters = _unique([*self.parameters, *self.state.parameters])
        self.inputs = _unique(tensors_in([args, kwargs]))
        held = tensors_in([vars(module) for module in self.modules])
        self.shards = Shards(self.modules)
        self.others = _unique([*held, *reached.constants.values(), *self.shards.hidden()])
        self.visited = reached.visited()
        self.holders = holders_in([*self.modules, *self.visited, *self.shards.objects, optimizer])
        self.is_compiled = any(map(is_compiled, (fn, *self.visited, *self.modules)))
        self.target = target_of(device, (*self.parameters, *self.inputs))
        self.may_step = True
        self.leaves_fakes = False

    @property
    def device(self) -> torch.device:
        """Whose memory is told."""
        return self.target.device

    def tensors(self) -> list[Tensor]:
        """Return the tensors that exist before the work, without gradients."""
        return _unique(
            [*self.parameters, *self.buffers, *self.state.tensors(), *self.inputs, *self.others]
        )

    def observe(self, *, is_counted: bool = False) -> Observer:
        """Run the work on tensors without data.

        Args:
            is_counted: whether to tell what a memory budget counts, rather than what there is.

        Raises:
            PredictionError: a module of ``fully_shard`` is between a forward and a backward pass;
                or the work keeps a tensor without data, and nobody knows what was there before.
        """
        check_between_passes(self.shards)
        gradient_sums.prepare()
        tensors = parts_of(self.tensors())
        mode = mode_for(tensors)
        left = FakesLeft(
            mode, [*self.modules, *self.visited], has_others=any(map(is_fake, tensors))
        )
        try:
            observer = self._observe(Observer(self.target, is_counted=is_counted), tensors, mode)
        except BaseException as error:
            del mode
            self.leaves_fakes = not left.take_out(error)
            if self.leaves_fakes:
                raise left.error() from error
            raise
        del mode
        self.leaves_fakes = not left.take_out()
        if self.leaves_fakes:
            raise left.error()
        return observer

    def _observe(self, observer: Observer, tensors: list[Tensor], mode: Any) -> Observer:
        undo = AllOf(
            (
                RngState(generators=self.generators),
                ModuleState(self.modules),
                Containers(self.holders),
            )
        )
        with Interrupts() as interrupts, persist(), ExitStack() as stack:
            # Old garbage that ends in the middle would hide as many bytes that are really taken
            # meanwhile; and work whose tensors only a collection frees may not get one in time.
            stack.enter_context(collector_paused())
            stack.enter_context(cpu_allocator.sizes_kept())
            undo.begin()
            stack.callback(undo.undo)
            stack.callback(_put_gradients, observer)
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            for replica in filter(has_other_replicas, self.modules):
                stack.enter_context(kept_apart(replica))
            stack.enter_context(gradients_kept(self.tensors()))
            for fake, real in stack.enter_context(lent_to_fakes(tensors, mode, self.target)):
                observer.known.learn(fake, real)
            self.shards.begin_anew()
            # on an accelerator that is here, devices tell it
            offloaded = self.shards.offloaded() if self.target.stands_for else []
            observer.is_offloading = bool(offloaded)
            observer.enter_existing(offloaded, "parameters")
            observer.enter_existing([p.grad for p in offloaded if p.grad is not None], "gradients")
            if offloaded:
                observer.enter_existing(self.state.tensors(), "optimizer state")
                stack.enter_context(offloading(observer))
            observer.is_offloading = False
            observer.enter_existing(self.parameters, "parameters")
            observer.enter_existing(self.buffers, "buffers")
            observer.enter_existing(self.gradients(), "gradients")
            observer.enter_existing(self.state.tensors(), "optimizer state")
            observer.enter_existing([*self.inputs, *self.others], "inputs")
            stack.enter_context(self._steps_told(observer, is_offloaded=bool(offloaded)))
            steps_as = None if offloaded else self.target.stands_for
            stack.enter_context(stepping_fakes(cpu_as=steps_as))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(unrecognised())
            stack.enter_context(self._no_fast_path(observer))
            stack.enter_context(self.target.shown())
            stack.enter_context(mode)
            stack.enter_context(shapes_found_unseen())
            stack.callback(tell_no_more, observer.note_resized)
            tell(observer.note_resized)
            stack.enter_context(observer)
            observer.begin()
            with interrupts.let_through():
                self._run(observer)
            observer.end()
            observer.name_blocks(self.gradients(), "gradients")
            observer.name_blocks(self.state.tensors(), "optimizer state")
        return observer

    def reasons(self) -> dict[str, None]:
        """Why the work may take something else than what is run here."""
        reasons: dict[str, None] = {}
        if self.is_compiled:
            reasons.setdefault(
                "compiled code is predicted as it is written, and may take more or less"
            )
        if self.target.stands_for is not None:
            reasons.setdefault(f"without {self.target.device} here, the kernels are the CPU's")
        if self.device.type == "mps":
            reasons.setdefault("the allocator of mps is taken to be as CUDA's")
        return reasons

    def _run(self, observer: Observer) -> None:
        try:
            result = self.fn(*self.args, **self.kwargs)
        except RuntimeError as error:
            if _CONVERTS in str(error):
                raise PredictionError(
                    "The memory of this work can't be predicted: it converts a module, as double() "
                    "and to() do, whose parameters have no data for the time being. Convert the "
                    "module before."
                ) from error
            if not any(text in str(error) for text in _NO_DATA):
                raise
            raise PredictionError(
                "The memory of this work can't be predicted: it reads values where no operation of "
                "torch does, and a prediction has none (see the error above). Predict the rest "
                "without that part, or run it once and see."
            ) from error
        except AssertionError as error:
            if not any(text in str(error) for text in _TWO_THREADS):
                raise
            raise PredictionError(
                "The memory of this work can't be predicted: two threads use its tensors, which "
                "have no data for the time being. Predict while no other thread uses the model, "
                "and without threads in the function."
            ) from error
        self._run_backward(result)
        observer.name_blocks(self.gradients(), "gradients")
        self.state.step(lambda: self._run_backward(self.fn(*self.args, **self.kwargs)))

    def _run_backward(self, result: Any) -> Any:
        losses = losses_in(result)
        ones = [None if loss.numel() == 1 else torch.ones_like(loss) for loss in losses]
        try:
            if losses:
                torch.autograd.backward(losses, ones)
        except RuntimeError as error:
            if BACKWARD_TWICE not in str(error):
                raise
            raise AdaptiveUsageError(
                "The function returned a loss whose graph has already run backward, so it ran "
                "backward itself. Return None or loss.detach()."
            ) from error
        return losses[0] if losses else result

    @contextmanager
    def _no_fast_path(self, observer: Observer) -> Iterator[None]:
        """Return a block in which torch's own attention runs as it does in training.

        In inference it has kernels of whole layers, into which nobody can look.
        """
        before = torch.backends.mha.get_fastpath_enabled()
        fast = any(isinstance(each, _WITH_FAST_PATH) for each in self.modules)
        if before and fast and not torch.is_grad_enabled():
            observer.reasons.setdefault("layers of attention run without their fast path")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    @contextmanager
    def _steps_told(self, observer: Observer, *, is_offloaded: bool) -> Iterator[None]:
        before: list[Any] = []
        thread = get_ident()

        def begin(*_: Any) -> None:
            if not self.may_step and get_ident() == thread:
                raise PredictionError(
                    "An optimizer steps inside the work: what it keeps can't be predicted and then "
                    "taken back."
                )
            before.append(observer.phase)
            observer.phase = "optimizer step"
            observer.is_offloading = is_offloaded

        def end(*_: Any) -> None:
            observer.phase = before.pop()
            observer.is_offloading = False

        with register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end):
            yield

    def gradients(self) -> list[Tensor]:
        """Return the gradients that exist now."""
        return [
            p.grad for p in (*self.parameters, *self.inputs) if p.is_leaf and p.grad is not None
        ]


class _OptimizerState:
    """Parameters and state of an optimizer, or of none."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer: Any = optimizer

    @property
    def parameters(self) -> list[Tensor]:
        """What it steps."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [p for group in groups for p in group["params"]]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that it keeps for its parameters."""
        if self._optimizer is None:
            return []
        known = {id(p) for p in self.parameters}
        kept = tensors_in([dict(self._optimizer.state), *self._plain_attributes()])
        return [tensor for tensor in kept if id(tensor) not in known]

    def _plain_attributes(self) -> list[Any]:
        return [v for k, v in vars(self._optimizer).items() if k not in ("state", "param_groups")]

    def step(self, closure: Callable[[], Any]) -> None:
        """Step it, if there is one; one that wants a closure gets that of the work.

        Raises:
            PredictionError: it is SparseAdam, whose step works on rows of sparse gradients.
        """
        if self._optimizer is None:
            return
        # without data a sparse gradient has no rows, and the step takes nothing for them
        if isinstance(self._optimizer, SparseAdam):
            raise PredictionError(
                "The memory of a step of SparseAdam can't be predicted: how many rows its "
                "gradients have depends on values. Predict without optimizer=. Then add its state, "
                "twice its parameters, and for the step about seven times the gradients."
            )
        wanted = signature(self._optimizer.step).parameters.get("closure")
        if wanted is not None and wanted.default is wanted.empty:
            self._optimizer.step(closure)
        else:
            self._optimizer.step()


def losses_in(result: Any) -> list[Tensor]:
    """Return what is run backward: a loss, its terms, or all that requires grad."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        result = loss
    return [each for each in tensors_in([result]) if each.requires_grad]


def _put_gradients(observer: Observer) -> None:
    """Give leaves that were no part of what was lent the gradients that they had."""
    for leaf, gradient in observer.unforeseen.values():
        leaf.grad = gradient


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
