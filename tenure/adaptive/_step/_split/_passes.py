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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..._reachable import generators_of
from ..._undo import ModuleState, RngState
from .._loss import (
    ONLY,
    Term,
    check_same_terms,
    check_weight_is_used,
    combined,
    finished_loss,
    scalar,
)
from .._samples import JoinedOutputs, Outputs
from ._parts import Chunk, StepParts
from ._weighted_terms import ChunkTerms, WeightedTerms

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
        weighted = WeightedTerms(self._chunks, first)
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
    """Return a block for a pass that needs no graphs."""
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
