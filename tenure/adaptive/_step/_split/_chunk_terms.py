"""What the function returns for each chunk, and how much it weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tenure._torch.quiet import without_functions

from .._loss import Reduction, Shares, Terms, terms_of
from ._spec import Chunk

if TYPE_CHECKING:
    from ._run import StepRun


class ChunkTerms:
    """The terms of each chunk.

    Args:
        run: the step.
        chunks: how it is split.

    Attributes:
        run: the step.
        lengths: the samples of each chunk.
        reduction: what the function returns for its samples.
        shares: how much the chunks weigh in a mean.
    """

    def __init__(self, run: StepRun, chunks: Sequence[Chunk]) -> None:
        assert not callable(run.spec.loss)
        self.run = run
        self.lengths = [chunk.length for chunk in chunks]
        self.reduction: Reduction = run.spec.loss
        self._chunks = chunks
        self.shares = Shares(self.lengths, self._weights())

    def of(self, i: int) -> Terms:
        """Run the function on a chunk."""
        returned = self.run.forward(self._chunks[i])
        with without_functions():
            return terms_of(returned, self.reduction)

    def _weights(self) -> list[object] | None:
        weight, inputs = self.run.spec.weight, self.run.inputs
        if weight is None:
            return None
        with torch.no_grad():
            return [weight(inputs.chunk(*chunk)) for chunk in self._chunks]
