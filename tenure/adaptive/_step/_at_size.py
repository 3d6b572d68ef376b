"""A step at a given size, once: what a prediction runs on tensors without data."""

from __future__ import annotations

from tenure.scopes import DisposeScope

from ._modules import no_optimizer_steps
from ._split import StepOutcome, StepParts, StepRun, StepSpec


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
    with DisposeScope("step") as scope, no_optimizer_steps(spec.entry):
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
