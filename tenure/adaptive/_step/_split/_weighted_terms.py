"""The terms of chunks, and how their gradients get a weight that is known only at the end.

Invariant: what a gradient was multiplied by when it was sent back, times what all are multiplied by
in the end, is the slope of the whole loss in the term of its chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._torch.quiet import without_functions

from .._loss import (
    Count,
    Reduction,
    Term,
    Terms,
    check_same_terms,
    finished_loss,
    terms_of,
    widened,
    widened_count,
    widest_float,
)
from .._shares import Shares
from ._parts import Chunk, StepParts


class ChunkTerms:
    """The terms of each chunk.

    Args:
        parts: the step.
        chunks: how it is split.

    Attributes:
        parts: the step.
        lengths: the samples of each chunk.
        reduction: what the function returns for its samples.
        shares: how much the chunks weigh in a mean.
    """

    def __init__(self, parts: StepParts, chunks: Sequence[Chunk]) -> None:
        assert not callable(parts.spec.loss)
        self.parts = parts
        self.lengths = [chunk.length for chunk in chunks]
        self.reduction: Reduction = parts.spec.loss
        self._chunks = chunks
        self.shares = Shares(self.lengths, self._weights())

    def of(self, i: int) -> Terms:
        """Run the function on a chunk."""
        returned = self.parts.forward(self._chunks[i])
        with without_functions():
            terms = terms_of(returned, self.reduction)
            counts = terms.counts().items()
            # a function may count the next chunk in the same tensor
            self.parts.divisors.setdefault(self._chunks[i], {}).update(
                (name, n.clone() if isinstance(n, Tensor) else n) for name, n in counts
            )
            return terms

    def _weights(self) -> list[object] | None:
        weight, inputs = self.parts.spec.weight, self.parts.inputs
        if weight is None:
            return None
        with torch.no_grad():
            weights = [weight(inputs.chunk(*chunk)) for chunk in self._chunks]
        for chunk, each in zip(self._chunks, weights, strict=True):
            named = each.items() if isinstance(each, Mapping) else ()
            by_name: dict[str | None, object] = {str(name): n for name, n in named}
            self.parts.divisors[chunk] = by_name or {None: each}
        return weights


class WeightedTerms:
    """Terms whose gradients are sent back with their weight, or with a part of it, at once.

    Args:
        chunks: the terms of each chunk.
        first: those of the first; the others have to have the same.
    """

    def __init__(self, chunks: ChunkTerms, first: Terms) -> None:
        self._chunks = chunks
        self._parts = chunks.parts
        self._then = chunks.parts.spec.then
        self._named = first.named
        self._with_counts = first.with_counts()
        self._totals = {name: _Total(self._guess(term)) for name, term in first.by_name.items()}

    def take(self, i: int, terms: Terms) -> None:
        """Send the gradient of one chunk back, and count its terms in."""
        check_same_terms(self._with_counts, terms.by_name)
        values, seeds, weightless = [], [], []
        # nothing here outlives the step
        with without_functions():
            for name, term in terms.by_name.items():
                share = self._share(name, i)
                total = self._totals[name]
                # the mean of no elements is nan, which a weight of zero does not undo
                if share:
                    total.add(term, share)
                if share and self._parts.factor:
                    seed = total.seed(term.value, share * self._parts.factor)
                    values.append(term.value)
                    seeds.append(self._parts.backward.scaled(seed))
                else:
                    weightless.append(term.value)
        self._parts.send_back(values, seeds, weightless)

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its terms; the gradients get the rest of their weight."""
        values = {name: total.value() for name, total in self._totals.items()}
        totals = self._totals.items()
        self._parts.counts = {name: total.count for name, total in totals if total.is_late}
        return self._rescaled(values), values

    def _share(self, name: str, i: int) -> float:
        # late ones get their whole weight at the end
        if self._chunks.reduction == "sum" or self._totals[name].is_late:
            return 1.0
        return self._chunks.shares.of(name)[i]

    def _guess(self, term: Term) -> Count | None:
        """Guess a late weight, so that half-precision gradients stay in range.

        A power of two, so that multiplying by it and dividing by it later is exact.
        """
        if term.count is None:
            return None
        n_samples, length = self._parts.n_samples, self._chunks.lengths[0]
        # computed where it is: reading the count would make the host wait for the device
        if isinstance(term.count, Tensor):
            finite = term.count.float().nan_to_num(posinf=1.0)
            expected = finite.clamp(min=1) * (n_samples / length)
            return torch.exp2(-expected.log2().round())
        # a count of zero or infinity has no power of two near it, and gives nan or 0 in the end, as
        # plain torch does: see test_a_count_that_is_not_finite_gives_what_the_division_gives
        count = term.count if math.isfinite(term.count) else 1
        return 2.0 ** -round(math.log2(max(count, 1) * n_samples / length))

    def _rescaled(self, values: dict[str, Tensor]) -> Tensor:
        """Give the gradients the weight that is known now."""
        (total, *others) = self._totals.values()
        loss, leaves = None, {}
        # of several terms none is late here, for `TermsPass` sent those to two passes
        factor: Tensor | None = None if others else total.factor()
        if self._then is not None:
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            loss = finished_loss(leaves, self._named, self._then)
            slope = _slope(loss, next(iter(leaves.values())))
            factor = slope if factor is None else factor * slope
        # after the last chunk has exchanged gradients, where modules do: a sum over ranks times a
        # factor is right only if all have the same, so a count has to be that of all ranks
        if factor is not None:
            if self._parts.spec.is_planned:
                raise AdaptiveUsageError(
                    "The loss of step() is multiplied by what is known only when all has run (a "
                    "count, or then()), and sharded modules have exchanged gradients by then. "
                    "Nothing was delivered. Return a mean, and give what it divides by, from "
                    "labels alone, as weight=; or pass batches that fit."
                )
            self._parts.scale(factor)
        # what then() itself is trained by comes after the factor
        if loss is not None:
            self._parts.backward.run_to(list(leaves.values()), loss)
            return loss.detach()
        return finished_loss(values, self._named, None)


class _Total:
    """A term summed over the chunks so far.

    Args:
        guess: a weight near the right one, if that is known only at the end.

    Attributes:
        count: the sum of the counts so far.
    """

    def __init__(self, guess: Count | None) -> None:
        self._sum: Tensor | None = None
        self.count: Any = 0
        self._guess = guess

    @property
    def is_late(self) -> bool:
        """Whether its weight is known only at the end."""
        return self._guess is not None

    def add(self, term: Term, share: float) -> None:
        value = widened(term.value.detach()) * share
        self._sum = value if self._sum is None else self._sum + value
        if term.count is not None:
            self.count = self.count + widened_count(term.count)

    def seed(self, value: Tensor, share: float) -> Tensor:
        """Return the factor of a term's gradient for a chunk, now."""
        # in the type of the term, in which the gradient is computed
        if isinstance(self._guess, Tensor):
            return self._guess.to(value)
        return torch.full_like(value, share if self._guess is None else self._guess)

    def factor(self) -> Tensor | None:
        """Return the factor to multiply by later; None for 1."""
        if self._guess is None:
            return None
        assert self._sum is not None
        device = self._sum.device
        # in float32, a count above 2 ** 24 and its reciprocal would be rounded
        count = torch.as_tensor(self.count, device=device).to(widest_float(device))
        return 1 / (count * self._guess)

    def value(self) -> Tensor:
        """Return the term of the whole batch."""
        # shares sum up to 1, so one of them is not zero
        assert self._sum is not None
        return self._sum / self.count if self.is_late else self._sum


def _slope(loss: Tensor, total: Tensor) -> Tensor:
    if loss.requires_grad:
        (slope,) = torch.autograd.grad(loss, total, retain_graph=True, allow_unused=True)
        if slope is not None:
            return slope
    raise AdaptiveUsageError(
        "then() of step() returned what is no function of the loss it got, so that no gradient "
        "comes back from it. Compute its result from its argument, with gradients enabled."
    )
