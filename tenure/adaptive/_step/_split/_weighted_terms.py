"""The terms of chunks, and how their gradients get a weight that is known only at the end.

Invariant: what a gradient was multiplied by when it was sent back, times what all are multiplied by
in the end, is the slope of the whole loss in the term of its chunk.
"""

from __future__ import annotations

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
    combined,
    finished_loss,
    terms_of,
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
            self.parts.divisors.setdefault(self._chunks[i], {}).update(terms.counts())
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

    A count is known only at the end. `TermsPass` sends several terms with counts to two passes, so
    a term with a count is the only one here.

    Args:
        chunks: the terms of each chunk.
        first: those of the first; the others have to have the same.
    """

    def __init__(self, chunks: ChunkTerms, first: Terms) -> None:
        self._chunks = chunks
        self._parts = chunks.parts
        self._named = first.named
        self._with_counts = first.with_counts()
        self._terms: list[dict[str, Term]] = []
        (term, *_) = first.by_name.values()
        n_chunks = self._parts.n_samples / chunks.lengths[0]
        self._guess = None if term.count is None else _power_of_two_near(term.count, n_chunks)

    def take(self, i: int, terms: Terms) -> None:
        """Send the gradient of one chunk back, and count its terms in."""
        check_same_terms(self._with_counts, terms.by_name)
        values, seeds, weightless = [], [], []
        factor = self._parts.factor
        is_whole = self._chunks.reduction == "sum" or self._guess is not None
        # nothing here outlives the step
        with without_functions():
            self._terms.append(terms.detached().by_name)
            for name, term in terms.by_name.items():
                share = 1.0 if is_whole else self._chunks.shares.of(name)[i]
                # the mean of no elements is nan, which a weight of zero does not undo
                if share and factor:
                    # in the type of the term, in which the gradient is computed
                    seed = torch.full_like(term.value, share * factor)
                    seed = seed if self._guess is None else self._guess.to(term.value)
                    values.append(term.value)
                    seeds.append(self._parts.backward.scaled(seed))
                else:
                    weightless.append(term.value)
        self._parts.send_back(values, seeds, weightless)

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its terms; the gradients get the rest of their weight."""
        then, chunks = self._parts.spec.then, self._chunks
        with without_functions():
            values = combined(self._terms, chunks.shares, chunks.reduction)
        loss, leaves, factor = None, {}, None
        if self._guess is not None:
            ((name, total),) = values.items()
            count: Any = sum(widened_count(chunk[name].count or 0) for chunk in self._terms)
            self._parts.counts = {name: count}
            # in float32, a count above 2 ** 24 and its reciprocal would be rounded
            count = torch.as_tensor(count, device=total.device).to(widest_float(total.device))
            factor = 1 / (count * self._guess.to(count.device))
        if then is not None:
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            loss = finished_loss(leaves, self._named, then)
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
        if loss is None:
            return finished_loss(values, self._named, None), values
        self._parts.backward.run_to(list(leaves.values()), loss)
        return loss.detach(), values


def _power_of_two_near(count: Count, n_chunks: float) -> Tensor:
    """Return a part of a late weight, which keeps half-precision gradients in range.

    Multiplying by a power of two now, and dividing by it later, is exact. A count of zero or
    infinity has none near it, and gives nan or 0 in the end, as plain torch does.
    """
    # computed on the device of the count: reading it would make the host wait
    finite = torch.as_tensor(count).float().nan_to_num(posinf=1.0)
    return torch.exp2(-(finite.clamp(min=1) * n_chunks).log2().round())


def _slope(loss: Tensor, total: Tensor) -> Tensor:
    if loss.requires_grad:
        (slope,) = torch.autograd.grad(loss, total, retain_graph=True, allow_unused=True)
        if slope is not None:
            return slope
    raise AdaptiveUsageError(
        "then() of step() returned what is no function of the loss it got, so that no gradient "
        "comes back from it. Compute its result from its argument, with gradients enabled."
    )
