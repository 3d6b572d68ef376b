"""The loss that a trainer would run backward, taken before it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from ._held_logs import HeldLogs, note_compared

T = TypeVar("T")


class LossOfBatch:
    """The function of all steps of one trainer, so that each is known to be the same work.

    Args:
        name: what errors and events call it.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    @contextmanager
    def being(self, loss_of: Callable[[Any], tuple[Tensor, HeldLogs]]) -> Iterator[None]:
        """Return a block in which it is a function, which it does not hold afterwards."""
        self._loss_of = loss_of
        try:
            yield
        finally:
            del self._loss_of

    # told by who verifies a split
    on_compared = staticmethod(note_compared)

    def __call__(self, batch: Any) -> tuple[Tensor, HeldLogs]:
        # Not by its name: whoever searches a step for modules follows names, and a trainer leads to
        # data sets and the state of optimizers. The modules are given, or seen when they run.
        returned: tuple[Tensor, HeldLogs] = vars(self)["_loss_of"](batch)
        return returned


def losses_taken(accelerator: Any, work: Callable[[], object]) -> list[Tensor]:
    """Return the losses that an accelerator gets while work runs; none is run backward."""
    losses: list[Tensor] = []
    _with_method(accelerator, "backward", lambda loss, **_: losses.append(loss), work)
    return losses


def outputs_taken(trainer: Any, work: Callable[[], object]) -> tuple[Any, float]:
    """Return what `compute_loss` gives while work runs, and what the Trainer multiplies it by.

    The Trainer divides it by the batches that it accumulates, unless it was divided already. What
    is no loss yet must not be divided: so the Trainer gets a one in its place.
    """
    outputs: list[Any] = []
    compute_loss = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        outputs.append(compute_loss(*args, **kwargs))
        return torch.ones((), dtype=torch.float64)

    def taken() -> float:
        return float(only_loss(losses_taken(trainer.accelerator, work), trainer))

    factor = _with_method(trainer, "compute_loss", noted, taken)
    return only_loss(outputs, trainer, "compute_loss()"), factor


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
