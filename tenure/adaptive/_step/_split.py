"""One step at a given micro-batch: forward and backward of every chunk, gradients exact.

Invariant: a run starts the step from the beginning and depends on nothing that an earlier run did,
and at most one chunk's graph is alive.

A loss that is a mean or a sum over samples runs in one pass, if the weights of its terms are known,
or if it is one sum with a count: then the gradients are multiplied at the end by what is known only
there. Any other loss takes two. The first, without graphs, gives the terms, or the outputs; the
loss of all gives the gradient of each; the second runs each chunk again, with the random numbers it
had, and sends that gradient back. Buffers, attributes and random state end as after the first pass
and the loss, as if nothing had run twice.
Source: GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._torch.autograd import WITHOUT_GRAPH
from tenure._torch.quiet import without_functions

from .._reachable import coupled_modules
from .._undo import ModuleState, RngState, generators_of
from ._loss import (
    ONLY,
    Count,
    Reduction,
    Term,
    Terms,
    check_declared,
    check_same_terms,
    combined,
    copied,
    finished_loss,
    scalar,
    shares_of,
    terms_of,
    widened_count,
    widest_float,
)
from ._outputs import JoinedOutputs, Outputs
from ._parts import Chunk, StepParts

Kept = TypeVar("Kept")
Result = tuple[Tensor, dict[str, Tensor]]
"""A loss, and its terms."""


class ChunkTerms:
    """The terms of each chunk.

    Args:
        parts: the step.
        chunks: how it is split.

    Attributes:
        reduction: what the function returns for its samples.
        shares: how much the chunks weigh in a mean.
    """

    def __init__(self, parts: StepParts, chunks: Sequence[Chunk]) -> None:
        assert not callable(parts.spec.loss)
        self.reduction: Reduction = parts.spec.loss
        self._parts, self._chunks = parts, chunks
        self.shares = shares_of([chunk.length for chunk in chunks], self._weights())

    def of(self, i: int) -> Terms:
        """Run the function on a chunk."""
        returned = self._parts.forward(self._chunks[i])
        with without_functions():
            terms = terms_of(returned, self.reduction)
            self._parts.divisors.setdefault(self._chunks[i], {}).update(terms.counts())
            return terms

    def _weights(self) -> list[object] | None:
        weight, inputs = self._parts.spec.weight, self._parts.inputs
        if weight is None:
            return None
        with torch.no_grad():
            weights = [copied(weight(inputs.chunk(*chunk))) for chunk in self._chunks]
        self._parts.divisors |= {
            chunk: {None: each} for chunk, each in zip(self._chunks, weights, strict=True)
        }
        return weights


def run_chunks(parts: StepParts, chunks: Sequence[Chunk]) -> Result:
    """Run all chunks forward and backward."""
    if callable(parts.spec.loss):
        return _run_outputs(parts, chunks)
    terms = ChunkTerms(parts, chunks)
    result = None if parts.spec.then is not None else _run_terms(parts, terms, chunks)
    return result or _run_terms_twice(parts, terms, len(chunks))


def _run_terms(parts: StepParts, of: ChunkTerms, chunks: Sequence[Chunk]) -> Result | None:
    """Run each chunk once, with its weight, or with a guess of it that is mended at the end.

    Returns:
        None if several terms have each a weight that is known at the end, or one counts nothing.
    """
    named, has_counts, guess = False, False, None
    with_counts: dict[str, bool] = {}
    seen: list[dict[str, Term]] = []
    for i in range(len(chunks)):
        terms = of.of(i)
        if not i:
            check_declared(terms, parts.spec.weight, parts.spec.then)
            named, with_counts = terms.named, terms.with_counts()
            has_counts = any(with_counts.values())
            if len(with_counts) > 1 and has_counts:
                parts.start_over()
                return None
        else:
            check_same_terms(with_counts, terms.by_name)
        # nothing here outlives the step
        with without_functions():
            seen.append(terms.detached().by_name)
            if guess is None and has_counts:
                (first,) = seen[0].values()
                guess = parts.scale_of_guess * _guessed(first, parts.n_samples / chunks[0].length)
            roots = _weighted(parts, of, i, terms, guess)
        # its graph must not be there beside the next one
        del terms
        parts.send_back(*roots)
        del roots
    totals = combined(seen, of.shares, of.reduction)
    if guess is not None:
        (name,) = with_counts
        counts = [chunk[name].count for chunk in seen]
        parts.counts = {name: sum(widened_count(count) for count in counts if count is not None)}
        _refuse_late_factor(parts)
        # in float32, a count above 2 ** 24 and its reciprocal would be rounded
        count = _as_tensor(parts.counts[name], totals[name]).to(widest_float(guess.device))
        # without data, as in a prediction, there is nothing to ask
        if type(count) is Tensor and not (count.is_meta or count):
            # labels that are all ignored have gradients of zero, times infinity nan: only backward
            # of the formula itself tells, so it starts over
            parts.start_over()
            return None
        parts.gradients.scale(1 / (count * guess))
    return finished_loss(totals, named, None), totals


def _weighted(
    parts: StepParts, of: ChunkTerms, i: int, terms: Terms, guess: Tensor | None
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """Return the terms of a chunk that weigh something, the gradient of each, and the others."""
    values: list[Tensor] = []
    seeds: list[Tensor | None] = []
    weightless = []
    factor = parts.factor * (of.shares[i] if of.reduction == "mean" else 1.0)
    for term in terms.by_name.values():
        if guess is not None:
            # in the type of the term, in which the gradient is computed
            seed = guess.to(term.value)
        elif factor:
            seed = torch.full_like(term.value, factor)
        else:
            # the mean of no elements is nan, which a weight of zero does not undo
            weightless.append(term.value)
            continue
        values.append(term.value)
        seeds.append(parts.backward.scaled(seed))
    return values, seeds, weightless


def _refuse_late_factor(parts: StepParts) -> None:
    # after the last chunk, because other ranks wait in each; a sum over ranks times a factor is
    # right only if all have the same, so a count has to be that of all ranks
    if parts.spec.is_planned:
        raise AdaptiveUsageError(
            "The loss of step() is multiplied by what is known only when all has run (a count), "
            "and sharded modules have exchanged gradients by then. Nothing was delivered. Return "
            "a mean, and give what it divides by, from labels alone, as weight=; or pass batches "
            "that fit."
        )


def _as_tensor(count: Count, like: Tensor) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(like.device)
    # filled where it is: a copy from the host would make it wait
    return torch.full((), count, dtype=widest_float(like.device), device=like.device)


def _guessed(term: Term, factor: float) -> Tensor:
    """Guess a weight that is known at the end, so that half-precision gradients stay in range.

    A power of two, so that multiplying by it and dividing by it later is exact. A count of infinity
    has none near it, and gives 0 in the end, as plain torch does.
    """
    assert term.count is not None
    finite = _as_tensor(term.count, term.value).float().nan_to_num(posinf=1.0).clamp(min=1)
    return torch.exp2(-(finite * factor).log2().round())


def _run_terms_twice(parts: StepParts, of: ChunkTerms, n_chunks: int) -> Result:
    """Run terms whose weights are known only when all chunks have run."""
    first: list[Terms] = []

    def forward(i: int) -> tuple[dict[str, Term], list[Tensor]]:
        terms = of.of(i)
        if not first:
            check_declared(terms, parts.spec.weight, parts.spec.then)
            first.append(terms.detached())
            # known where the first run found that nothing counts
            parts.counts = parts.counts or dict.fromkeys(terms.counts(), float("nan"))
        with_counts = first[0].with_counts()
        check_same_terms(with_counts, terms.by_name)
        return terms.detached().by_name, [terms.by_name[name].value for name in with_counts]

    def loss_of(chunks: list[dict[str, Term]]) -> tuple[Result, list[list[Tensor | None]]]:
        with torch.enable_grad():
            # the formula of the whole, differentiated at the numbers of the first pass
            leaves = [term.value.requires_grad_() for chunk in chunks for term in chunk.values()]
            values = combined(chunks, of.shares, of.reduction)
            loss = finished_loss(values, first[0].named, parts.spec.then)
            parts.backward.run_to(leaves, loss)
        result = copied(loss), {name: value.detach() for name, value in values.items()}
        return result, [[chunk[name].value.grad for name in first[0].by_name] for chunk in chunks]

    return _two_passes(parts, n_chunks, forward, loss_of)


def _run_outputs(parts: StepParts, chunks: Sequence[Chunk]) -> Result:
    """Run a loss of the outputs of all chunks."""
    spec = parts.spec

    def forward(i: int) -> tuple[Outputs, list[Tensor]]:
        outputs = Outputs(parts.forward(chunks[i]), spec.out_dims, chunks[i].length)
        return outputs.detached(), outputs.tensors

    def loss_of(each: list[Outputs]) -> tuple[Result, list[list[Tensor | None]]]:
        assert callable(spec.loss)
        joined = JoinedOutputs(each)
        loss = scalar(joined.loss_by(spec.loss), "loss() of step()")
        with torch.enable_grad():
            parts.backward.run_to(joined.roots, loss)
        value = copied(loss)
        return (value, {ONLY: value}), joined.gradients()

    return _two_passes(parts, len(chunks), forward, loss_of)


def _two_passes(
    parts: StepParts,
    n_chunks: int,
    forward: Callable[[int], tuple[Kept, Sequence[Tensor]]],
    loss_of: Callable[[list[Kept]], tuple[Result, Sequence[Sequence[Tensor | None]]]],
) -> Result:
    """Run both passes.

    Args:
        parts: the step.
        n_chunks: how many there are.
        forward: runs chunk i; what ``loss_of`` gets of it, and the tensors that get gradients.
        loss_of: runs the loss backward to the outputs, and gives it, its terms, and the gradients
            of each chunk's tensors; None for a tensor that gets none.
    """
    models, state = parts.models, parts.state
    drawn: list[RngState] = []
    outputs: list[Kept] = []
    # modes are no matter of the passes: a function sets in the second what it set in the first
    at_start = ModuleState(models.all, with_modes=False)
    at_end = ModuleState(models.all, with_modes=False)
    at_start.begin()
    starts_over = False
    try:
        with (
            torch.enable_grad() if parts.needs_graphs else torch.no_grad(),
            models.telling(at_start.add, lambda new: drawn[-1].add(generators_of(new))),
        ):
            for i in range(n_chunks):
                drawn.append(state.random_now())
                outputs.append(forward(i)[0])
    except RuntimeError as error:
        # the function differentiates by itself, as for forces or a gradient penalty
        if parts.needs_graphs or WITHOUT_GRAPH not in str(error):
            raise
        starts_over = parts.needs_graphs = True
    if starts_over:
        # after the handler, whose error keeps all that the function has made
        outputs.clear()
        parts.start_over()
        return _two_passes(parts, n_chunks, forward, loss_of)
    # Older versions of torch keep weights that were cast without a graph in autocast's cache, and
    # these get no gradient in the second pass: https://github.com/pytorch/pytorch/issues/158232.
    torch.clear_autocast_cache()
    parts.inputs.begin()
    # outside of `no_grad` and of the listeners: the loss runs once, and its state is kept
    result, gradients = loss_of(outputs)
    # the gradients are as large, and both need not be there beside a graph
    del outputs
    end = state.random_now()
    at_end.begin()
    # the second pass finds the buffers that the first one found
    at_start.undo()
    # also those that the loss does not depend on: other ranks may wait for them in modules, and
    # what one of them makes, such as a layer, the others use
    for i in range(n_chunks):
        drawn[i].undo()
        tensors = forward(i)[1]
        # an output that the loss does not use gets none
        pairs = [(t, g) for t, g in zip(tensors, gradients[i], strict=True) if g is not None]
        roots, seeds = [root for root, _ in pairs], [seed for _, seed in pairs]
        parts.send_back(roots, seeds, () if roots else tensors)
        del tensors, pairs, roots
    at_end.undo()
    end.undo()
    return result


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a run.

    Attributes:
        loss: of no dimension, without graph; with what ``once`` adds.
        terms: the same by name, without that.
        sizes: the samples of each micro-batch.
        aux: what the function returned beside its loss for each.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    sizes: tuple[int, ...]
    aux: tuple[Any, ...] = ()


class Verifier(Protocol):
    """Looks at a split run, and may raise."""

    def before_split(self, size: int) -> None:
        """Before the first micro-batch runs."""

    def before_delivery(self, outcome: StepOutcome) -> None:
        """Before any gradient leaves the run."""


def run_at(
    parts: StepParts, size: int, verifier: Verifier | None = None, *, trains: bool = True
) -> StepOutcome:
    """Run the whole step in micro-batches of ``size`` samples.

    Args:
        parts: the step.
        size: the samples of a micro-batch.
        verifier: looks at split runs.
        trains: False in a block without graphs, for the values alone.
    """
    is_split = size < parts.n_samples
    parts.begin(is_split=is_split)
    with parts.watching():
        outcome = _split(parts, size, verifier) if is_split else _whole(parts)
    if trains and not parts.backward.n_roots:
        raise AdaptiveUsageError(
            "No loss of step() requires grad, so there is nothing to run backward. Call it with "
            "gradients enabled, and let the function return what it computed from parameters that "
            "require grad, not a number or a detached tensor."
        )
    if is_split and verifier is not None:
        verifier.before_delivery(outcome)
    return outcome


def try_at(parts: StepParts, size: int) -> None:
    """Run micro-batches of a size, to see what they need; the state is to be undone then.

    Two of them, because the second finds the gradients of the first beside it.
    """
    spec = parts.spec
    parts.begin(is_split=True, is_trial=True)
    with parts.watching():
        parts.check_splittable(size)
        parts.let_hooks_wait()
        for chunk in _chunks(parts, size)[:2]:
            returned = parts.forward(chunk)
            # what the loss will be is not known for one chunk, and ones take as much memory
            if callable(spec.loss):
                tensors = Outputs(returned, spec.out_dims, chunk.length).tensors
            else:
                tensors = [each.value for each in terms_of(returned, spec.loss).by_name.values()]
            # its graph goes with what it returned
            del returned
            parts.send_back(tensors, [torch.ones_like(tensor) for tensor in tensors])
            del tensors


def _whole(parts: StepParts) -> StepOutcome:
    spec, inputs, backward = parts.spec, parts.inputs, parts.backward
    # compiled code is compiled for a size that may change, before it has to be for a smaller one
    with inputs.expecting_other_sizes() if parts.may_compile else nullcontext():
        returned = parts.call(inputs.whole())
    if callable(spec.loss):
        loss = scalar(spec.loss(returned), "loss() of step()")
        terms = {ONLY: loss}
    else:
        with without_functions():
            returned = terms_of(returned, spec.loss)
            parts.counts = returned.counts()
            check_declared(returned, spec.weight, spec.then)
        terms = {
            name: term.value if term.count is None else term.value / term.count
            for name, term in returned.by_name.items()
        }
        loss = finished_loss(terms, returned.named, spec.then)
    # what the backward pass does not need goes before it: logits, and sums that have been divided
    del returned
    if parts.spec.once is not None:
        loss = loss + parts.once()
    if parts.factor == 1:
        parts.send_back([backward.scaled(loss)], [None])
    elif parts.factor:
        with without_functions():
            seed = torch.full_like(loss, parts.factor)
        parts.send_back([loss], [backward.scaled(seed)])
    else:
        # it may be nan, which zero does not undo
        parts.send_back([], [], [loss])
    # copies: the function may compute its next loss in the same memory
    value = copied(loss)
    by_name = {name: value if each is loss else copied(each) for name, each in terms.items()}
    return StepOutcome(value, by_name, (parts.n_samples,), tuple(parts.aux.values()))


def _split(parts: StepParts, size: int, verifier: Verifier | None) -> StepOutcome:
    parts.check_splittable(size)
    # before the first chunk: its graph and gradients would stand beside those of the samples
    if verifier is not None:
        verifier.before_split(size)
    # after that, because the function may register a hook in it, and one more in the first chunk
    parts.let_hooks_wait()
    chunks = _chunks(parts, size)
    loss, terms = run_chunks(parts, chunks)
    if parts.spec.once is not None:
        # last, so that its graph is never there beside that of a chunk
        extra = parts.once()
        parts.backward.run([parts.backward.scaled(extra)], [None])
        loss = loss + extra.detach()
    sizes = tuple([chunk.length for chunk in chunks])
    return StepOutcome(loss, terms, sizes, tuple(parts.aux.values()))


def _chunks(parts: StepParts, size: int) -> list[Chunk]:
    """Return how the batch is split; one sample alone at the end gets a partner.

    It has no statistics, and compiled code would be compiled once more for it. The partner comes
    from the chunk before. Where that has only two, a chunk is larger than ``size``, if a module is
    known that can't run on one sample.
    """
    if parts.n_parts is not None:
        ends = [i * parts.n_samples // parts.n_parts for i in range(parts.n_parts + 1)]
        return [Chunk(start, end - start) for start, end in pairwise(ends)]
    starts = range(0, parts.n_samples, size)
    chunks = [Chunk(start, min(size, parts.n_samples - start)) for start in starts]
    # with size 1 all are alone, and there is no partner to give
    if size == 1 or chunks[-1].length > 1:
        return chunks
    *others, before, last = chunks
    if size > 2:
        return [*others, Chunk(before.start, size - 1), Chunk(last.start - 1, 2)]
    # asked again, for modules that were seen meanwhile count too
    if parts.spec.batchnorm == "per_chunk" and coupled_modules(parts.roots):
        return [*others, Chunk(before.start, size + 1)]
    return chunks
