"""One step at a given micro-batch: forward and backward of every chunk, gradients exact.

Invariant: a run starts the step from the beginning and depends on nothing that an earlier run did,
and at most one chunk's graph is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from tenure._torch.quiet import without_functions

from .._loss import ONLY, check_weight_is_used, scalar, terms_of, whole_loss
from .._modules import coupled_modules
from .._samples import Outputs
from ._parts import Chunk, StepParts
from ._passes import OutputsPass, TermsPass


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a run gives.

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


class StepRun:
    """Runs a step at one micro-batch after another, until one fits.

    Args:
        parts: the step.
        verifier: looks at split runs.
    """

    def __init__(self, parts: StepParts, verifier: Verifier | None = None) -> None:
        self._parts = parts
        self._verifier = verifier

    def run(self, size: int) -> StepOutcome:
        """Run the whole step in micro-batches of ``size`` samples."""
        parts = self._parts
        is_split = size < parts.n_samples
        parts.begin(is_split=is_split)
        with parts.watching():
            try:
                outcome = self._split(size) if is_split else self._whole()
            finally:
                parts.exchange.resume()
        parts.backward.check_ran()
        if is_split and self._verifier is not None:
            self._verifier.before_delivery(outcome)
        parts.deliver_to_batch()
        return replace(outcome, aux=tuple(parts.aux[start] for start in sorted(parts.aux)))

    def try_out(self, size: int) -> None:
        """Run micro-batches of a size, to see what they need; the state is to be undone then.

        Two of them, because the second finds the gradients of the first beside it.
        """
        parts = self._parts
        parts.begin(is_split=True, is_trial=True)
        with parts.watching():
            parts.check_splittable(size)
            parts.exchange.hold_back()
            try:
                for chunk in self._chunks(size)[:2]:
                    self._try_chunk(chunk)
            finally:
                parts.exchange.resume()

    def _try_chunk(self, chunk: Chunk) -> None:
        spec, returned = self._parts.spec, self._parts.forward(chunk)
        # what the loss will be is not known for one chunk, and ones take as much memory
        if callable(spec.loss):
            tensors = Outputs(returned, spec.out_dims, chunk.length).tensors
        else:
            tensors = [term.value for term in terms_of(returned, spec.loss).by_name.values()]
        self._parts.send_back(tensors, [torch.ones_like(tensor) for tensor in tensors])

    def _whole(self) -> StepOutcome:
        parts = self._parts
        inputs, backward = parts.inputs, parts.backward
        # a leaf of both graphs gets its gradient in two passes
        if inputs.has_graph:
            parts.gradients.hold_hooks(inputs.leaves)
        loss, terms = self._whole_loss()
        if parts.spec.once is not None:
            loss = loss + parts.once()
        if parts.factor == 1:
            parts.run_back([backward.scaled(loss)], [None])
        elif parts.factor:
            with without_functions():
                seed = torch.full_like(loss, parts.factor)
            parts.run_back([loss], [backward.scaled(seed)])
        else:
            # it may be nan, which zero does not undo
            parts.run_back([], [], [loss])
        detached = {name: value.detach() for name, value in terms.items()}
        return StepOutcome(loss.detach(), detached, (parts.n_samples,))

    def _add_once(self, loss: Tensor) -> Tensor:
        """Run what is added once.

        Last, so that its graph is never there beside that of a chunk.
        """
        parts = self._parts
        if parts.spec.once is None:
            return loss
        extra = parts.once()
        parts.backward.run([parts.backward.scaled(extra)], [None])
        return loss + extra.detach()

    def _whole_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the function on the batch; the loss, and its terms."""
        spec, inputs = self._parts.spec, self._parts.inputs
        # compiled code is compiled for a size that may change, before it has to be for a smaller
        # one
        with inputs.expecting_other_sizes():
            returned = self._parts.call(inputs.whole())
        if callable(spec.loss):
            loss = scalar(spec.loss(returned), "loss() of step()")
            return loss, {ONLY: loss}
        with without_functions():
            terms = terms_of(returned, spec.loss)
        check_weight_is_used(terms, spec.weight)
        self._parts.counts = terms.counts()
        return whole_loss(terms, spec.then)

    def _split(self, size: int) -> StepOutcome:
        parts = self._parts
        parts.check_splittable(size)
        # before the first chunk: its graph and gradients would stand beside those of the samples
        if self._verifier is not None:
            self._verifier.before_split(size)
        if not parts.spec.is_planned:
            parts.exchange.hold_back()
        chunks = self._chunks(size)
        kind = OutputsPass if callable(parts.spec.loss) else TermsPass
        loss, terms = kind(parts, chunks).run()
        return StepOutcome(self._add_once(loss), terms, tuple(length for _, length in chunks))

    def _chunks(self, size: int) -> list[Chunk]:
        """Return how the batch is split; one sample alone at the end gets a partner.

        It has no statistics, and compiled code would be compiled once more for it. The partner
        comes from the chunk before. Where that has only two, a chunk is larger than ``size``, if
        a module is known that can't run on one sample.
        """
        parts = self._parts
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
