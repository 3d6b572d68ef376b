"""Ranks agree in both kinds of steps: on the arguments, the share of each, and the loss of all.

`StepRanks` tries again, and `PlannedRanks` runs once.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tenure._errors import AdaptiveUsageError
from tenure._torch.quiet import without_functions

from ..._ranks import MOST_TERMS, Ballot
from .._arguments import StepSpec
from .._loss import numbers_of
from .._parts import StepParts
from .._split import StepOutcome


def asked_by(spec: StepSpec, *, per_rank: bool) -> str:
    """Return the arguments of a call that have to be the same on all ranks, in words."""
    loss = "outputs" if callable(spec.loss) else spec.loss
    given = [f"{name}=" for name in ("weight", "then", "once") if getattr(spec, name) is not None]
    return ", ".join([f"loss={loss!r}", *given, *(["per_rank=True"] if per_rank else [])])


def weight_of(parts: StepParts) -> float:
    """Return the weight of this rank's samples: ``weight``, or else their number.

    Raises:
        AdaptiveUsageError: it is not a number, or less than zero, or not finite.
    """
    weight = parts.spec.weight
    if weight is None:
        return float(parts.n_samples)
    with torch.no_grad():
        return numbers_of([weight(parts.inputs.whole())])[0]


def share_of(weight: float, n_samples: int, tally: Ballot) -> float:
    """Return the share of a rank in the mean over all samples."""
    # the mean over what all weighs nothing has no value; as on one rank samples stand in
    return weight / tally.weight if tally.weight else n_samples / tally.n_samples


def refuse_other_terms(tally: Ballot) -> None:
    """Make sure that the function returned the same terms on all ranks, by the sizes of a vote.

    Raises:
        AdaptiveUsageError: it did not.
    """
    if not tally.is_one_size:
        raise AdaptiveUsageError(
            "The function of step() returned other terms on one rank than on another, or in "
            "another order, or with a count on one of them alone: no rule makes one of these. "
            "Nothing was delivered. Return the same names, in one order, each with a count on all "
            "ranks or on none; a rank where nothing counts returns a count of 0."
        )


class LossOfAll:
    """The loss and the terms of this rank, and room for those of all ranks.

    Args:
        parts: the step.
        outcome: what this rank has got; None if it has no samples.
    """

    def __init__(self, parts: StepParts, outcome: StepOutcome | None) -> None:
        if outcome is None:
            like = next((leaf for leaf in parts.trained if leaf.is_floating_point()), None)
            loss = torch.zeros(()) if like is None else like.new_zeros(())
            outcome = StepOutcome(loss.detach() if parts.added is None else parts.added, {}, ())
        if len(outcome.terms) > MOST_TERMS:
            raise AdaptiveUsageError(
                f"The function of step() returned {len(outcome.terms)} terms, and ranks can agree "
                f"on {MOST_TERMS} at most. Nothing was changed. Return fewer terms."
            )
        self.own = outcome
        # made here, for nothing may be allocated once ranks have agreed
        self._loss = torch.empty_like(outcome.loss)
        self._terms = {name: torch.empty_like(term) for name, term in outcome.terms.items()}

    def times(self, *factors: float) -> list[float]:
        """Return the loss and the terms of this rank times each factor, to be summed in a vote."""
        with without_functions():
            numbers = [float(each) for each in (self.own.loss, *self.own.terms.values())]
        numbers += [0.0] * (1 + MOST_TERMS - len(numbers))
        # the mean of nothing is nan, which zero times it would stay
        return [number * factor if factor else 0.0 for factor in factors for number in numbers]

    def of_all(self, tally: Ballot, *, is_sum: bool) -> StepOutcome:
        """Return the outcome of this rank with the loss and the terms of all.

        Args:
            tally: the vote, with those of each rank times its weight, and times its samples.
            is_sum: whether they are sums already.
        """
        # without any samples nothing is added once
        values = tally.values if tally.n_with_data else [0.0] * len(tally.values)
        divisor = 1.0 if is_sum else tally.weight
        if not divisor:
            # the mean over what all weighs nothing has no value; as on one rank samples stand in
            values, divisor = values[1 + MOST_TERMS :], tally.n_samples or math.nan
        for tensor, value in zip((self._loss, *self._terms.values()), values, strict=False):
            tensor.fill_(value / divisor)
        return replace(self.own, loss=self._loss, terms=self._terms)
