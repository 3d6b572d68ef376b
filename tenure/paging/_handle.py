"""The handle of a paged model, and steps of an optimizer during the backward pass.

Invariant: unpaging, in whatever way the block ended, puts everything back.

An optimizer may step, part by part, while the backward pass that computes its gradients runs: each
parameter once, with its whole gradient, when no node of the pass needs it any more, for autograd
adds its gradient up after the last of them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn, optim

from tenure._errors import PagingError
from tenure._registries import shrinkables
from tenure._text import format_bytes
from tenure._torch.optimizers import before_post_hooks, pre_hooks_of, unhooked_step
from tenure._torch.patches import Patch

from ._entry import Attached
from ._pager import Pager, after_captures, check_capture
from ._plan import PagingPlan
from ._report import PagingReport, make_report
from ._tensors import Unit
from ._training import TrainingEngine

_TOGETHER = (optim.LBFGS,)
"""Those whose step looks at all parameters at once."""


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
            # as outside of a backward pass, where hooks of gradients run with them or without
            with only(together), torch.enable_grad():
                prepare(optimizer)
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
