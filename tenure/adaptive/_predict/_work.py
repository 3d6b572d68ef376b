"""Work whose memory is predicted: what it may reach, and the one run of it on tensors without data.

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
from tenure._devices import Elsewhere
from tenure._errors import AdaptiveUsageError, PredictionError
from tenure._heap import collector_paused
from tenure._registries import namers
from tenure._torch import cpu_allocator, gradient_sums
from tenure._torch.autograd import BACKWARD_TWICE
from tenure._torch.compiler import is_compiled
from tenure._torch.fakes import is_fake, mode_of, new_mode, saving_on_host, unrecognised
from tenure._torch.optimizers import stepping_fakes
from tenure._torch.resizing import tell, tell_no_more
from tenure._torch.sharding import Shards, is_dtensor, offloading, shapes_found_unseen
from tenure.scopes import persist

from .._interrupts import Interrupts
from .._ranks import has_other_replicas, kept_apart
from .._reachable import Reachable
from .._undo import RngState, modules_below
from ._device import target_of
from ._lent import (
    FakesLeft,
    containers_below,
    leaves_in,
    lent_to_fakes,
    parts_of,
    restore_leaves,
)
from ._observer import Observer

_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_CAUSES: tuple[tuple[type[Exception], tuple[str, ...], str], ...] = (
    (
        RuntimeError,
        ("_apply(): Couldn't swap",),
        "it converts a module, as double() and to() do, whose parameters have no data for the time "
        "being. Convert the module before.",
    ),
    (
        RuntimeError,
        ("data is not allocated", "is not supported for tensor subclasses"),
        "it reads values where no operation of torch does, and a prediction has none (see the "
        "error above). Predict the rest without that part, or run it once and see.",
    ),
    (
        AssertionError,
        ("in_kernel_invocation", "False, True", "True, False"),
        "two threads use its tensors, which have no data for the time being. Predict while no "
        "other thread uses the model, and without threads in the function.",
    ),
)
"""Errors of torch on tensors without data, what their texts contain, and what they mean."""


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
        self.modules = modules_below([*self.roots.values(), *given])
        self.names: dict[int, str] = {}
        for name, module in self.roots.items():
            for below, each in module.named_modules(prefix="" if len(self.roots) == 1 else name):
                self.names.setdefault(id(each), below or name)
        self._generators = reached.all_generators(self.modules)
        self._visited = reached.visited()
        # the work may step some itself
        self._optimizers: list[Any] = [
            each for each in (*self._visited, optimizer) if issubclass(type(each), Optimizer)
        ]
        groups = [group for each in self._optimizers for group in each.param_groups]
        self.parameters = _unique(
            [p for module in self.modules for p in module._parameters.values()]
            + [*reached.captured(), *(p for group in groups for p in group["params"])]
        )
        self._buffers = _unique(b for module in self.modules for b in module._buffers.values())
        self._inputs = _unique(tensors_in([args, kwargs]))
        held = tensors_in([vars(module) for module in self.modules])
        self._shards = Shards(self.modules)
        self._others = _unique([*held, *reached.constants.values(), *self._shards.hidden()])
        self._is_compiled = any(map(is_compiled, (fn, *self._visited, *self.modules)))
        self.target = target_of(device, (*self.parameters, *self._inputs))
        self.may_step = True
        self.leaves_fakes = False

    @property
    def device(self) -> torch.device:
        """The device whose memory is predicted."""
        return self.target.device

    def tensors(self) -> list[Tensor]:
        """Return the tensors that exist before the work, without gradients."""
        return _unique(
            [*self.parameters, *self._buffers, *self._state(), *self._inputs, *self._others]
        )

    def gradients(self) -> list[Tensor]:
        """Return the gradients that exist now."""
        return [
            p.grad for p in (*self.parameters, *self._inputs) if p.is_leaf and p.grad is not None
        ]

    def _state(self) -> list[Tensor]:
        return [tensor for each in self._optimizers for tensor in self._state_of(each)]

    def _state_of(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the tensors that an optimizer keeps for its parameters."""
        attributes = vars(optimizer).items()
        beside = [value for name, value in attributes if name not in ("state", "param_groups")]
        known = set(map(id, self.parameters))
        kept = tensors_in([dict(optimizer.state), *beside])
        return [tensor for tensor in kept if id(tensor) not in known]

    def observe(self, *, is_counted: bool = False) -> Observer:
        """Run the work on tensors without data.

        Args:
            is_counted: whether to tell what a memory budget counts, rather than what there is.

        Raises:
            PredictionError: a model is paged or of TorchScript, or a module of ``fully_shard`` is
                between a forward and a backward pass; or the work keeps a tensor without data, and
                nobody knows what was there before.
        """
        reached = set(map(id, self.parameters))
        for model in (namer.served_model() for namer in namers.alive()):
            if model is not None and not reached.isdisjoint(map(id, model.parameters())):
                raise PredictionError(
                    f"The memory of this work can't be predicted: {type(model).__name__} is paged, "
                    "and only a part of its weights is on the device. Call plan_paging(..., "
                    "inputs=...) before page(), or unpage() to predict the model as a whole."
                )
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise PredictionError(
                    f"The memory of this work can't be predicted: {type(module).__name__} is a "
                    "module of TorchScript, which reads its weights where nobody can show it "
                    "others. Predict the Python module that it was made of."
                )
        if self._shards.is_exchanging:
            # what is predicted would be added to it
            raise PredictionError(
                "The memory of this work can't be predicted: a module of fully_shard has gradients "
                "or parameters that wait for an exchange with other ranks. Predict before the "
                "first pass, or after a backward pass that exchanges."
            )
        gradient_sums.prepare()
        tensors = parts_of(self.tensors())
        fakes = [each for each in tensors if is_fake(each)]
        mode = mode_of(fakes[0]) if fakes else new_mode()
        left = FakesLeft(mode, [*self.modules, *self._visited], has_others=bool(fakes))
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
        rng = RngState(generators=self._generators)
        holders = [*self.modules, *self._visited, *self._shards.objects, self.optimizer]
        with Interrupts() as interrupts, persist(), ExitStack() as stack:
            # Old garbage that ends in the middle would hide as many bytes that are really taken
            # meanwhile; and work whose tensors only a collection frees may not get one in time.
            stack.enter_context(collector_paused())
            stack.enter_context(cpu_allocator.sizes_kept())
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            rng.begin()
            stack.callback(rng.undo)
            stack.callback(_put_back, containers_below(holders))
            stack.callback(lambda: restore_leaves(observer.unforeseen.values()))
            for replica in filter(has_other_replicas, self.modules):
                stack.enter_context(kept_apart(replica))
            # other leaves and their gradients are lent
            stack.callback(restore_leaves, leaves_in(filter(is_dtensor, self.tensors())))
            for fake, real in stack.enter_context(lent_to_fakes(tensors, mode, self.target)):
                observer.known.learn(fake, real)
            self._shards.begin_anew()
            # on an accelerator that is here, devices tell it
            offloaded = self._shards.offloaded() if self.target.stands_for else []
            self._enter_existing(observer, offloaded)
            if offloaded:
                stack.enter_context(offloading(observer))
            stack.enter_context(self._steps_told(observer, is_offloaded=bool(offloaded)))
            stands_for = self.target.stands_for
            stack.enter_context(stepping_fakes(cpu_as=None if offloaded else stands_for))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(unrecognised())
            stack.enter_context(self._without_fast_path(observer))
            if stands_for is not None:
                shown = Elsewhere(stands_for.__eq__, self.target.runs_on, keeps_names=True)
                stack.enter_context(shown)
                stack.enter_context(saving_on_host(observer))
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
        return observer

    def _enter_existing(self, observer: Observer, offloaded: list[Tensor]) -> None:
        """Note all memory that is there before the work, first what is offloaded to the host."""
        if offloaded:
            observer.is_offloading = True
            observer.enter_existing(offloaded, "parameters")
            gradients = [p.grad for p in offloaded if p.grad is not None]
            observer.enter_existing(gradients, "gradients")
            observer.enter_existing(self._state(), "optimizer state")
            observer.is_offloading = False
        observer.enter_existing(self.parameters, "parameters")
        observer.enter_existing(self._buffers, "buffers")
        observer.enter_existing(self.gradients(), "gradients")
        observer.enter_existing(self._state(), "optimizer state")
        observer.enter_existing([*self._inputs, *self._others], "inputs")

    @contextmanager
    def _without_fast_path(self, observer: Observer) -> Iterator[None]:
        """Run torch's own attention as in training, in a block.

        In inference it has kernels of whole layers, into which nobody can look.
        """
        has_fast_path = torch.backends.mha.get_fastpath_enabled()
        fast = has_fast_path and any(isinstance(m, _WITH_FAST_PATH) for m in self.modules)
        if fast and not torch.is_grad_enabled():
            observer.reasons.setdefault("layers of attention run without their fast path")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(has_fast_path)

    def reasons(self) -> list[str]:
        """Return why the work may take something else than what is run here."""
        reasons = {
            "compiled code is predicted as it is written, and may take more or less": (
                self._is_compiled
            ),
            f"without {self.device} here, the kernels are the CPU's": (
                self.target.stands_for is not None
            ),
            "the allocator of mps is taken to be as CUDA's": self.device.type == "mps",
        }
        return [reason for reason, holds in reasons.items() if holds]

    def _run(self, observer: Observer) -> None:
        try:
            result = self.fn(*self.args, **self.kwargs)
        except (RuntimeError, AssertionError) as error:
            for kind, texts, cause in _CAUSES:
                if isinstance(error, kind) and any(text in str(error) for text in texts):
                    told = f"The memory of this work can't be predicted: {cause}"
                    raise PredictionError(told) from error
            raise
        _run_backward(result)
        observer.name_blocks(self.gradients(), "gradients")
        optimizer: Any = self.optimizer
        # without data a sparse gradient has no rows, and the step takes nothing for them
        if isinstance(optimizer, SparseAdam):
            raise PredictionError(
                "The memory of a step of SparseAdam can't be predicted: how many rows its "
                "gradients have depends on values. Predict without optimizer=. Then add its state, "
                "twice its parameters, and for the step about seven times the gradients."
            )
        if optimizer is not None:
            wanted = signature(optimizer.step).parameters.get("closure")
            if wanted is not None and wanted.default is wanted.empty:
                optimizer.step(lambda: _run_backward(self.fn(*self.args, **self.kwargs)))
            else:
                optimizer.step()

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

        def end(optimizer: Optimizer, *_: Any) -> None:
            observer.phase = before.pop()
            observer.is_offloading = False
            # also of one that the work itself steps
            observer.name_blocks(self._state_of(optimizer), "optimizer state")

        with register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end):
            yield


def _run_backward(result: Any) -> Any:
    """Run a loss backward, or its terms, or all that requires grad."""
    loss = getattr(result, "loss", None)
    shown = loss if isinstance(loss, Tensor) else result
    losses = [each for each in tensors_in([shown]) if each.requires_grad]
    if not losses:
        return shown
    ones = [None if loss.numel() == 1 else torch.ones_like(loss) for loss in losses]
    try:
        torch.autograd.backward(losses, ones)
    except RuntimeError as error:
        if BACKWARD_TWICE not in str(error):
            raise
        raise AdaptiveUsageError(
            "The function returned a loss whose graph has already run backward, so it ran "
            "backward itself. Return None or loss.detach()."
        ) from error
    return losses[0]


def _put_back(notes: list[Any]) -> None:
    for note in notes:
        if not note.is_same():
            note.undo()


def _unique(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return list({id(each): each for each in tensors if each is not None}.values())
