"""The loss that a trainer would run backward, and what it logs meanwhile, taken before it does.

Invariant: what failed attempts and verifications log is forgotten with them; of the attempt that
worked all is told once, as for the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from .._joined import BatchPart, Joiner, NumberRules, StepEvent, side_by_side

if TYPE_CHECKING:
    from tenure.adaptive import StepResult

T = TypeVar("T")
_ADVICE = "Log it in a callback, or where the whole batch has run, such as after training_step()."


class LossOfBatch:
    """The function of all steps of one trainer, so that each is known to be the same work.

    Each event of its parts is a call of `log`: the numbers by name, and how: its other arguments.

    Args:
        name: what errors and events call it.

    Attributes:
        rules: how logs of the trainer add up.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.rules = NumberRules()

    def on_compared(self, whole: Any, split: Any) -> None:
        """Find out how logged values add up, from a few samples that ran whole and in parts."""
        joiner = Joiner(split.aux, split.sizes, split.loss, self.rules)
        for first, *others in side_by_side([*whole.aux, *split.aux], "log") or ():
            for name, value in first.value.items():
                self.rules.learn(joiner, _place(name), [e.value[name] for e in others], value)

    def joined_logs(self, result: StepResult) -> Iterator[StepEvent]:
        """Yield the events of a batch, of those of its micro-batches."""
        parts: Sequence[BatchPart] = result.aux
        events = side_by_side(parts, "log")
        if events is None:
            # one that logs for some of its samples alone
            for part in parts:
                yield from part.events
            return
        joiner = Joiner(parts, result.sizes, result.loss, self.rules)
        for each in events:
            columns = {name: [event.value[name] for event in each] for name in each[0].name}
            logs = {
                name: joiner.log(values, _place(name), _ADVICE) for name, values in columns.items()
            }
            yield each[0]._replace(value=logs)

    @contextmanager
    def being(self, loss_of: Callable[[Any], tuple[Tensor, BatchPart]]) -> Iterator[None]:
        """Return a block in which it is a function, which it does not hold afterwards."""
        self._loss_of = loss_of
        try:
            yield
        finally:
            del self._loss_of

    def __call__(self, batch: Any) -> tuple[Tensor, BatchPart]:
        # Not by its name: whoever searches a step for modules follows names, and a trainer leads to
        # data sets and the state of optimizers. The modules are given, or seen when they run.
        returned: tuple[Tensor, BatchPart] = vars(self)["_loss_of"](batch)
        return returned


def _place(name: str) -> str:
    return f"{name!r} was logged"


def losses_taken(accelerator: Any, work: Callable[[], object]) -> list[Tensor]:
    """Return the losses that an accelerator gets while work runs; none is run backward."""
    losses: list[Tensor] = []
    _with_method(accelerator, "backward", lambda loss, **_: losses.append(loss), work)
    return losses


def outputs_taken(trainer: Any, work: Callable[[], object]) -> tuple[Any, float]:
    """Return what `compute_loss` gives while work runs, and what the Trainer multiplies it by.

    The Trainer divides it by the batches that it accumulates, unless it was divided already. What
    is no loss yet must not be divided: so the Trainer gets a one in its place.

    Raises:
        AdaptiveUsageError: it does something else, such as to add a penalty.
    """
    outputs: list[Any] = []
    compute_loss = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        outputs.append(compute_loss(*args, **kwargs))
        return one

    def taken() -> Tensor:
        loss: Tensor = only_loss(losses_taken(trainer.accelerator, work), trainer)
        return loss

    # without gradients, where a split is tried, nothing tells: the run with them does
    one = torch.ones((), dtype=torch.float64, requires_grad=torch.is_grad_enabled())
    loss = _with_method(trainer, "compute_loss", noted, taken)
    factor = loss.item()
    if one.requires_grad and not _is_multiple(loss, one):
        raise AdaptiveUsageError(
            f"{type(trainer).__name__}.training_step() does more with the loss than to multiply "
            "it, but loss=, then= or once= of adaptive_options makes the loss after it. Add a "
            "penalty of parameters with once=."
        )
    return only_loss(outputs, trainer, "compute_loss()"), factor


def _is_multiple(loss: Tensor, one: Tensor) -> bool:
    if not loss.requires_grad:
        return False
    (slope,) = torch.autograd.grad(loss, one, materialize_grads=True)
    return math.isclose(slope.item(), loss.item(), rel_tol=1e-6)


def _with_method(owner: Any, name: str, method: Callable[..., Any], work: Callable[[], T]) -> T:
    """Run work while an object has another method."""
    before = vars(owner).get(name)
    # no context manager: Ctrl-C may come as its end begins, and nothing would run backward again
    try:
        setattr(owner, name, method)
        return work()
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def only_loss(losses: list[Any], trainer: object, called: str = "accelerator.backward()") -> Any:
    """Return the one loss that was taken.

    Raises:
        AdaptiveUsageError: there were several, or none.
    """
    if len(losses) != 1:
        raise AdaptiveUsageError(
            f"{type(trainer).__name__}.training_step() called {called} "
            f"{len(losses)} times, so there is no one loss to split. Let it call that once for "
            "each batch, or train with a Trainer that is not adaptive."
        )
    return losses[0]
