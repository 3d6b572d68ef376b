"""The loss that a trainer would run backward, and what it logs meanwhile.

Invariant: what failed attempts and verifications log is forgotten with them; of the attempt that
worked all is logged once, as for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tenure._errors import AdaptiveUsageError

from .._joined import Joiner, log_of

_ADVICE = "Log it in a callback, or where the whole batch has run, such as after training_step()."
_Call = tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class HeldLogs:
    """What one micro-batch logged.

    Attributes:
        calls: what `log` got, in order: numbers by name, and the other arguments.
        loss: of the micro-batch.
        weight: what that is a mean over; None: its samples.
    """

    calls: list[_Call] = field(default_factory=list)
    loss: Tensor | None = None
    weight: Any = None


def joined_logs(
    trainer: object, parts: Sequence[HeldLogs], sizes: Sequence[int], loss: Tensor
) -> Iterator[_Call]:
    """Yield the values to log of a batch.

    Args:
        trainer: logs it.
        parts: what its micro-batches logged.
        sizes: the samples of each.
        loss: of the batch.
    """
    if len({tuple(tuple(logs) for logs, _, _ in part.calls) for part in parts}) > 1:
        # one that logs for some of its samples alone
        for part in parts:
            yield from part.calls
        return
    weights = None if parts[0].weight is None else [part.weight for part in parts]
    joiner = Joiner(sizes, [part.loss for part in parts], loss, weights)
    for calls in zip(*(part.calls for part in parts), strict=True):
        first, args, kwargs = calls[0]
        logs = {
            name: log_of(
                joiner, trainer, name, [call[0][name] for call in calls], [{}] * len(calls), _ADVICE
            )[0]
            for name in first
        }
        yield logs, args, kwargs


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
