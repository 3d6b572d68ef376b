"""Terms whose weights are known only when all chunks have run: a pass to find them, and another."""

from __future__ import annotations

import torch
from torch import Tensor

from .._loss import Term, check_same_terms, combined, finished_loss
from ._chunk_terms import ChunkTerms
from ._two_pass import two_passes


class SurveyedTerms:
    """Forward without graphs, the loss of all terms, and forward and backward of each chunk.

    Args:
        chunks: the terms of each chunk.
        with_counts: the terms that each chunk has to have, and whether with a count.
        named: whether the function named them.
    """

    def __init__(self, chunks: ChunkTerms, with_counts: dict[str, bool], named: bool) -> None:
        self._chunks = chunks
        self._run = chunks.run
        self._with_counts = with_counts
        self._named = named
        self._loss: Tensor | None = None
        self._values: dict[str, Tensor] = {}

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run it from the start; the loss, and its terms."""
        run = self._run
        run.inputs.run_again()
        run.state.undo()
        two_passes(
            len(self._chunks.lengths),
            self._forward,
            self._differentiate,
            run.send_back,
            models=run.models,
            devices=run.devices,
            generators=run.state.generators,
        )
        assert self._loss is not None
        return self._loss, self._values

    def _forward(self, i: int) -> tuple[dict[str, Term], list[Tensor]]:
        terms = self._chunks.of(i)
        check_same_terms(self._with_counts, terms.by_name)
        tensors = [terms.by_name[name].value for name in self._with_counts]
        return terms.detached().by_name, tensors

    def _differentiate(self, chunks: list[dict[str, Term]]) -> list[list[Tensor | None]]:
        run = self._run
        run.inputs.run_again()
        with torch.enable_grad():
            leaves = [term.value.requires_grad_() for chunk in chunks for term in chunk.values()]
            values = combined(chunks, self._chunks.shares, self._chunks.reduction)
            loss = finished_loss(values, self._named, run.spec.then)
            run.backward.run([run.backward.scaled(loss)], [None], leaves)
        self._loss = loss.detach()
        self._values = {name: value.detach() for name, value in values.items()}
        return [[chunk[name].value.grad for name in self._with_counts] for chunk in chunks]
