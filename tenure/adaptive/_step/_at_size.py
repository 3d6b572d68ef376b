"""A step at a given size, once: what a prediction runs on tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from tenure.scopes import DisposeScope

from ._modules import no_optimizer_steps
from ._samples import SampleTree
from ._split import StepOutcome, StepParts, StepRun, StepSpec

# the first, one beside its gradients, one more, and the last with a partner of the one before
_ENOUGH = 5


def step_at_size(spec: StepSpec, size: int) -> StepOutcome:
    """Run what `step` runs when this size fits; nothing is searched, verified or remembered.

    Args:
        spec: the arguments of the step.
        size: the samples of a micro-batch.

    Raises:
        BatchCoupledError: the batch would have to be split, and a module mixes its samples.
        AdaptiveUsageError: an argument, or what the function returns, can't be used.
    """
    spec.check()
    parts = StepParts(spec)
    state = parts.rollback()
    # other processes know nothing of what is only predicted
    quiet: AbstractContextManager[Any] = (
        nullcontext() if spec.is_planned else parts.without_exchange()
    )
    with quiet, DisposeScope("step") as scope, no_optimizer_steps(spec.entry):
        state.begin()
        try:
            outcome = StepRun(parts).run(size)
        except BaseException:
            state.undo()
            raise
        state.finish()
        # as after a step: gradients, and what the function has kept, are not the block's
        if made := scope.owned():
            scope.move_to_outer(made)
    return outcome


class SizedStep:
    """A step at one size and another, on as many of its samples as tell what memory it takes.

    Args:
        spec: the step.

    Attributes:
        n_samples: the samples of its batch.
        reached: the functions and modules that it runs. A function that has them as a default is
            searched as they are, and what they use is named as their code names it.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        loss = spec.loss if callable(spec.loss) else None
        self.reached = (spec.fn, spec.model, loss, spec.then, spec.once)
        tree = self._tree(spec.batch)
        self.n_samples = tree.n_samples()
        # outputs pile up with each micro-batch, and so do gradients of parts of the batch
        self._piles_up = callable(spec.loss) or any(
            leaf.is_split and isinstance(leaf.value, Tensor) and leaf.value.requires_grad
            for leaf in tree.leaves
        )

    def length(self, size: int) -> int:
        """Return the number of samples to run, because middle micro-batches are alike."""
        n = self.n_samples
        n_middle = 0 if self._piles_up else max(n // size - _ENOUGH, 0)
        return n - n_middle * size

    def at(
        self,
        size: int,
        length: int,
        *,
        fn: Callable[[Any], Any] | None = None,
        done: Callable[[StepOutcome], None] | None = None,
    ) -> Callable[[Any], None]:
        """Return a function of the batch that runs the step on the first of its samples.

        Args:
            size: the samples of a micro-batch.
            length: how many samples are run.
            fn: runs instead of the step's own.
            done: gets what the step gives.
        """
        spec = self._spec if fn is None else replace(self._spec, fn=fn)

        def run(batch: Any, _reached: Any = self.reached) -> None:
            part = batch if length == self.n_samples else self._first(batch, length)
            outcome = step_at_size(replace(spec, batch=part), size)
            if done is not None:
                done(outcome)

        return run

    def _first(self, batch: Any, length: int) -> Any:
        tree = self._tree(batch)
        # views: the batch is there as a whole
        return tree.with_leaves([leaf.part(0, length) for leaf in tree.leaves])

    def _tree(self, batch: Any) -> SampleTree:
        return SampleTree(batch, self._spec.in_dims, name="batch", argument="in_dims")
