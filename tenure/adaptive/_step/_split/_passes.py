"""How the chunks of a split step run: in one pass or two, each with the factor that is its own.

A loss that is a mean or a sum over samples, the cheapest way that is exact: with weights that are
known, one pass; with one weight that is known only at the end and no other term, one pass, and the
gradients are multiplied by it then; with a count among several terms, or several terms and
``then``, a pass without graphs that finds what each is multiplied by, and another.

Any loss on the outputs of chunks: the first pass, without graphs, gives the outputs; the loss of
all gives the gradient of each; the second runs each chunk again, with the random numbers it had,
and sends that gradient back. Only one chunk's graph is there at a time, and buffers, attributes and
random state end as after the first pass and the loss, as if nothing had run twice.
Source: GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._torch.quiet import without_functions

from ..._undo import ModuleState, RngState
from .._loss import (
    ONLY,
    Count,
    Reduction,
    Shares,
    Term,
    Terms,
    check_same_terms,
    check_weight_is_used,
    combined,
    finished_loss,
    scalar,
    terms_of,
    widened,
    widened_count,
    widest_float,
)
from .._modules import generators_of
from .._samples import JoinedOutputs, Outputs
from ._parts import Chunk, StepParts

Output = TypeVar("Output")
Gradients = Sequence[Tensor | None]


class TermsPass:
    """Forward and backward of each chunk, weighted.

    Args:
        parts: the step.
        chunks: how it is split.
    """

    def __init__(self, parts: StepParts, chunks: Sequence[Chunk]) -> None:
        self._parts = parts
        self._chunks = ChunkTerms(parts, chunks)

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run it; the loss, and its terms."""
        self._exchange_if_last(0)
        first = self._chunks.of(0)
        check_weight_is_used(first, self._parts.spec.weight)
        with_counts, named = first.with_counts(), first.named
        # `then` of one term can be multiplied in later; of several, each has another slope
        needs_all = any(with_counts.values()) or self._parts.spec.then is not None
        if len(with_counts) > 1 and needs_all:
            del first
            return _SurveyedTerms(self._chunks, with_counts, named).run()
        weighted = _WeightedTerms(self._chunks, first)
        weighted.take(0, first)
        # its graph must not be there beside the next one
        del first
        for i in range(1, len(self._chunks.lengths)):
            self._exchange_if_last(i)
            weighted.take(i, self._chunks.of(i))
        return weighted.finish()

    def _exchange_if_last(self, i: int) -> None:
        if i == len(self._chunks.lengths) - 1:
            self._parts.exchange.resume()


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
            return terms_of(returned, self.reduction)

    def _weights(self) -> list[object] | None:
        weight, inputs = self.parts.spec.weight, self.parts.inputs
        if weight is None:
            return None
        with torch.no_grad():
            return [weight(inputs.chunk(*chunk)) for chunk in self._chunks]


class _WeightedTerms:
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
                share, factor = self._share(name, i), self._parts.factor_of(name)
                total = self._totals[name]
                # the mean of no elements is nan, which a weight of zero does not undo
                if share:
                    total.add(term, share)
                if share and factor:
                    seed = total.seed(term.value, share * factor)
                    values.append(term.value)
                    seeds.append(self._parts.backward.scaled(seed))
                else:
                    weightless.append(term.value)
        self._parts.send_back(values, seeds, weightless)

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its terms; the gradients get the rest of their weight."""
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
        """One part of what a late weight will be, so that half-precision gradients stay in range.

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
        """What the gradient of the term for a chunk is multiplied by now."""
        # in the type of the term, in which the gradient is computed
        if isinstance(self._guess, Tensor):
            return self._guess.to(value)
        return torch.full_like(value, share if self._guess is None else self._guess)

    def factor(self) -> Tensor | None:
        """What it is to be multiplied by later; None for 1."""
        if self._guess is None:
            return None
        assert self._sum is not None
        device = self._sum.device
        # in float32, a count above 2 ** 24 and its reciprocal would be rounded
        count = torch.as_tensor(self.count, device=device).to(widest_float(device))
        return 1 / (count * self._guess)

    def value(self) -> Tensor:
        """The term of the whole batch."""
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


class _SurveyedTerms:
    """Terms whose weights are known only when all chunks have run.

    Forward without graphs, the loss of all terms, and forward and backward of each chunk.

    Args:
        chunks: the terms of each chunk.
        with_counts: the terms that each chunk has to have, and whether with a count.
        named: whether the function named them.
    """

    def __init__(self, chunks: ChunkTerms, with_counts: dict[str, bool], named: bool) -> None:
        self._chunks = chunks
        self._parts = chunks.parts
        self._with_counts = with_counts
        self._named = named
        self._loss: Tensor | None = None
        self._values: dict[str, Tensor] = {}

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run it from the start; the loss, and its terms."""
        # the first chunk has run already, and buffers and random numbers start over
        self._parts.inputs.run_again()
        self._parts.state.undo()
        self._parts.counts = {n: float("nan") for n, has in self._with_counts.items() if has}
        _two_passes(self._parts, len(self._chunks.lengths), self._forward, self._differentiate)
        assert self._loss is not None
        return self._loss, self._values

    def _forward(self, i: int) -> tuple[dict[str, Term], list[Tensor]]:
        terms = self._chunks.of(i)
        check_same_terms(self._with_counts, terms.by_name)
        tensors = [terms.by_name[name].value for name in self._with_counts]
        return terms.detached().by_name, tensors

    def _differentiate(self, chunks: list[dict[str, Term]]) -> list[list[Tensor | None]]:
        parts = self._parts
        parts.inputs.run_again()
        with torch.enable_grad():
            # the formula of the whole, differentiated at the numbers of the first pass
            leaves = [term.value.requires_grad_() for chunk in chunks for term in chunk.values()]
            values = combined(chunks, self._chunks.shares, self._chunks.reduction)
            loss = finished_loss(values, self._named, parts.spec.then)
            parts.backward.run_to(leaves, loss)
        self._loss = loss.detach()
        self._values = {name: value.detach() for name, value in values.items()}
        return [[chunk[name].value.grad for name in self._with_counts] for chunk in chunks]


class OutputsPass:
    """Forward without graphs, the loss of all outputs, and forward and backward of each chunk.

    Args:
        parts: the step.
        chunks: how it is split.
    """

    def __init__(self, parts: StepParts, chunks: Sequence[Chunk]) -> None:
        self._parts = parts
        self._chunks = chunks

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run it; the loss, and the same by name."""
        _two_passes(self._parts, len(self._chunks), self._forward, self._differentiate)
        return self._value, {ONLY: self._value}

    def _forward(self, i: int) -> tuple[Outputs, list[Tensor]]:
        chunk = self._chunks[i]
        outputs = Outputs(self._parts.forward(chunk), self._parts.spec.out_dims, chunk.length)
        return outputs.detached(), outputs.tensors

    def _differentiate(self, chunks: list[Outputs]) -> list[list[Tensor | None]]:
        parts, loss_of = self._parts, self._parts.spec.loss
        assert callable(loss_of)
        parts.inputs.run_again()
        joined = JoinedOutputs(chunks)
        returned: Any = loss_of(joined.value)
        loss = scalar(returned, "loss() of step()")
        self._value = loss.detach()
        with torch.enable_grad():
            parts.backward.run_to(joined.roots, loss)
        return joined.gradients()


def _without_graphs(parts: StepParts) -> AbstractContextManager[Any]:
    """A block for a pass that needs no graphs."""
    # compiled code would be compiled once more without gradients: there each graph is let go with
    # its outputs, and the second pass has as much alive at once
    return torch.enable_grad() if parts.compiled else torch.no_grad()


def _two_passes(
    parts: StepParts,
    n_chunks: int,
    forward: Callable[[int], tuple[Output, Sequence[Tensor]]],
    loss_of: Callable[[list[Output]], Sequence[Gradients]],
) -> None:
    """Run both passes.

    Args:
        parts: the step.
        n_chunks: how many there are.
        forward: runs chunk i; what ``loss_of`` gets of it, and the tensors that get gradients.
        loss_of: runs the loss backward to the outputs, and gives the gradients of each chunk's
            tensors; None for a tensor that gets none.
    """
    models, state = parts.models, parts.state
    drawn: list[RngState] = []
    outputs: list[Output] = []
    # modes are no matter of the passes: a function sets in the second what it set in the first
    at_start = ModuleState(models.all, with_modes=False)
    at_end = ModuleState(models.all, with_modes=False)
    at_start.begin()
    with (
        _without_graphs(parts),
        models.telling(at_start.add),
        models.telling(lambda new: drawn[-1].add(generators_of(new))),
    ):
        for i in range(n_chunks):
            drawn.append(state.random_now())
            outputs.append(forward(i)[0])
    # Older versions of torch keep weights that were cast without a graph in autocast's cache, and
    # these get no gradient in the second pass: https://github.com/pytorch/pytorch/issues/158232.
    torch.clear_autocast_cache()
    # outside of `no_grad` and of the listeners: the loss runs once, and its state is kept
    gradients = loss_of(outputs)
    # the gradients are as large, and both need not be there beside a graph
    del outputs
    end = state.random_now()
    at_end.begin()
    # the second pass finds the buffers that the first one found
    at_start.undo()
    # a chunk that the loss does not depend on has nothing to learn
    learning = [i for i, each in enumerate(gradients) if any(g is not None for g in each)]
    # but other ranks may wait for it in modules
    for i in range(n_chunks) if parts.spec.is_planned else learning:
        if learning and i == learning[-1]:
            parts.exchange.resume()
        drawn[i].undo()
        tensors = forward(i)[1]
        parts.send_back(tensors, gradients[i], () if i in learning else tensors)
    at_end.undo()
    end.undo()
