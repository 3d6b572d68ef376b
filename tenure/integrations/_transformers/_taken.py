"""The loss that a trainer would run backward, taken before it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


def refuse_divided(trainer: Any, options: Mapping[str, Any], *, has_n_items: bool) -> None:
    """Make sure that the Trainer divides a loss, and not the outputs that `step` makes one of.

    Args:
        trainer: divides what `compute_loss` returns by the batches that it accumulates.
        options: those of `step`.
        has_n_items: whether a count of all these batches was made, by which the loss divides.

    Raises:
        AdaptiveUsageError: it would divide outputs or terms, or no penalty.
    """
    names = [name for name in ("then", "once") if name in options]
    names += ["loss"] if callable(options.get("loss")) else []
    n_batches = trainer.args.gradient_accumulation_steps
    if not names or n_batches == 1:
        return
    # as in Trainer.training_step(), whose versions differ: one that is here divides in none
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is None:
        is_scaled = trainer.compute_loss_func is not None or (
            trainer.model_accepts_loss_kwargs and has_n_items
        )
    if not is_scaled:
        raise AdaptiveUsageError(
            f"{type(trainer).__name__}.adaptive_options has {names[0]}=, and the Trainer divides "
            f"what compute_loss() returns by gradient_accumulation_steps={n_batches} before, so "
            "that it would be another loss. Nothing was changed. Set gradient_accumulation_steps=1 "
            "and a larger per_device_train_batch_size, which is split if it does not fit; or call "
            "tenure.integrations.accelerate.step() in a loop of your own."
        )


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
