"""The loss and the terms of all ranks, of those of each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..._ranks import MOST_TERMS, RankGroup, refuse_many_terms
from .._loss import widest_float
from .._split import StepOutcome, StepParts


class Values:
    """The loss and the terms of one rank, and room for those of all.

    Args:
        parts: the step.
        outcome: what this rank has got; None where it has no samples.
    """

    def __init__(self, parts: StepParts, outcome: StepOutcome | None) -> None:
        if outcome is None:
            like = next((leaf for leaf in parts.trained if leaf.is_floating_point()), None)
            loss = torch.zeros(()) if like is None else like.new_zeros(())
            outcome = StepOutcome(loss.detach(), {}, ())
            if parts.added is not None:
                outcome = replace(outcome, loss=parts.added)
        refuse_many_terms(len(outcome.terms), "The function of step() returned")
        self._outcome = outcome
        device = outcome.loss.device
        self._summed = torch.zeros(1 + MOST_TERMS, dtype=widest_float(device), device=device)
        # made here, for nothing may be allocated once ranks have agreed
        self._loss = torch.empty_like(outcome.loss)
        self._terms = {name: torch.empty_like(term) for name, term in outcome.terms.items()}
        for i, value in enumerate(_contributions(parts, outcome)):
            if value is not None:
                self._summed[i] = value

    def own(self) -> StepOutcome:
        """Those of this rank."""
        return self._outcome

    def of_all(
        self, group: RankGroup, share: float, n_with_data: int, *, is_sum: bool
    ) -> StepOutcome:
        """Those of all ranks; they talk here."""
        summed = self._summed
        if n_with_data:
            # as of gradients: the mean of nothing is nan, which zero times it would stay
            summed.mul_(share) if share else summed.zero_()
            group.sum(summed)
        else:
            # of no samples at all
            summed.fill_(0.0 if is_sum else float("nan"))
        self._loss.copy_(summed[0])
        for i, term in enumerate(self._terms.values(), 1):
            term.copy_(summed[i])
        return replace(self._outcome, loss=self._loss, terms=self._terms)


def _contributions(parts: StepParts, outcome: StepOutcome) -> list[Tensor | None]:
    """What this rank adds to the loss and to each term; None for what weighs nothing here."""
    if parts.factors is None:
        return [outcome.loss, *outcome.terms.values()]
    factors = {name: parts.factor_of(name) for name in outcome.terms}
    terms = [term * factors[n] if factors[n] else None for n, term in outcome.terms.items()]
    added = [] if parts.added is None else [parts.added * parts.share_of_once]
    weighed = [*added, *(term for term in terms if term is not None)]
    return [sum(weighed[1:], weighed[0]) if weighed else None, *terms]
