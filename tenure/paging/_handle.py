"""The handle of a paged model.

Invariant: unpaging, in whatever way the block ended, puts everything back.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from tenure._errors import PagingError
from tenure._registries import shrinkables
from tenure._text import format_bytes
from tenure._torch.patches import Patch

from ._entry import Attached
from ._pager import Pager, after_captures, check_capture
from ._plan import PagingPlan
from ._report import PagingReport, make_report
from ._stepping import Stepping, checked_optimizer, needs_all_gradients, stepped_after
from ._training import TrainingEngine


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
        return Stepping(checked, self._engine.units, prepare).running()

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
