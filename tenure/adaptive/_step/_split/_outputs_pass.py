"""A split step whose loss wants the outputs for the whole batch: two passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._loss import ONLY, scalar
from .._samples import JoinedOutputs, Outputs
from ._spec import Chunk
from ._two_pass import two_passes

if TYPE_CHECKING:
    from ._run import StepRun


class OutputsPass:
    """Forward without graphs, the loss of all outputs, and forward and backward of each chunk.

    Args:
        run: the step.
        chunks: how it is split.
    """

    def __init__(self, run: StepRun, chunks: Sequence[Chunk]) -> None:
        self._run = run
        self._chunks = chunks

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run it; the loss, and the same by name."""
        run = self._run
        two_passes(
            len(self._chunks),
            self._forward,
            self._differentiate,
            run.send_back,
            models=run.models,
            devices=run.devices,
            generators=run.state.generators,
        )
        return self._value, {ONLY: self._value}

    def _forward(self, i: int) -> tuple[Outputs, list[Tensor]]:
        chunk = self._chunks[i]
        outputs = Outputs(self._run.forward(chunk), self._run.spec.out_dims, chunk.length)
        return outputs.detached(), outputs.tensors

    def _differentiate(self, chunks: list[Outputs]) -> list[list[Tensor | None]]:
        run, loss_of = self._run, self._run.spec.loss
        assert callable(loss_of)
        run.inputs.run_again()
        joined = JoinedOutputs(chunks)
        returned: Any = loss_of(joined.value)
        loss = scalar(returned, "loss() of step()")
        self._value = loss.detach()
        with torch.enable_grad():
            run.backward.run([run.backward.scaled(loss)], [None], joined.roots)
        return joined.gradients()
