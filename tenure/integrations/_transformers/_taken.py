"""The loss that a trainer would run backward, taken before it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tenure._errors import AdaptiveUsageError

from ._held_logs import HeldLogs, note_compared


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
    before, losses = vars(accelerator).get("backward"), []
    # no context manager: Ctrl-C may come as its end begins, and nothing would run backward again
    try:
        accelerator.backward = lambda loss, **_: losses.append(loss)
        work()
    finally:
        if before is None:
            del accelerator.backward
        else:
            accelerator.backward = before
    return losses


def only_loss(losses: list[Tensor], trainer: object) -> Tensor:
    """Return the one loss that was taken.

    Raises:
        AdaptiveUsageError: there were several, or none.
    """
    if len(losses) != 1:
        raise AdaptiveUsageError(
            f"{type(trainer).__name__}.training_step() called accelerator.backward() "
            f"{len(losses)} times, so there is no one loss to split. Let it call that once for "
            "each batch, or train with a Trainer that is not adaptive."
        )
    return losses[0]
