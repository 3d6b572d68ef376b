"""Who is inside a model that is trained: forwards that a graph records, and its backward passes.

A backward pass runs where autograd runs it, as a rule on a thread of its own for the device, and
torch tells nobody that it begins: it does where a node first asks for a weight.

Invariant: a backward pass is inside as a forward is: until it ends, or fails, no other thread is.
What it needs it holds only while a node that runs holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable
from threading import RLock, get_ident

import torch
from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._torch.autograd import (
    at_end_of_backward,
    hooks_of_saved,
    is_in_engine,
    is_running_node,
    running_task,
)
from tenure._torch.compiler import never_compiled

from .._device import Forward, Page, Pass
from .._model import HostTensor, Unit
from .._training import Route, SavedTensors, TrainingEngine, is_of_checkpoint
from ._pager import Pager
from ._refusals import check_capture, check_training


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
        self._saved = SavedTensors(
            engine, self._page_for_backward, self._activations, self._wake_backward
        )
        # Of the last pass that was recorded: the next backward pass is most likely its.
        self._recorded: Hashable = None
        # The backward passes of autograd's that the one that is inside is for.
        self._tasks: set[int] = set()
        self._joining = RLock()
        # What a forward has read in a checkpoint around no module: none is called to recompute it.
        self._checkpointed: set[HostTensor] = set()

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
            end = self._saved.watch()
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
        return page.alias(host, Route(host, self.engine.homeward).alias)

    def _begin(self, now: Pass, module: nn.Module) -> None:
        now.records = torch.is_grad_enabled()
        if self._activations is not None:
            self._activations.note_stream()
        super()._begin(now, module)

    def _check_gradients(self, module: nn.Module) -> None:
        check_training(module, self._hosts)

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

    def _page_for_backward(self, unit: Unit) -> Page:
        return self._page_of(unit, self._backward_pass())

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
