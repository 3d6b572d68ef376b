"""Exact gradients of any loss on the outputs of chunks, with the graph of one chunk at a time.

The first pass runs without graphs and gives the outputs; the loss of all of them gives the gradient
of each; the second pass runs each chunk again, with the random numbers it had, and sends that
gradient back through it.

Invariant: buffers, attributes and random state end as after the first pass and the loss, as if
nothing had run twice.

Source: GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..._undo import ModuleState, RngState
from .._loss import ONLY, scalar
from .._modules import generators_of
from .._samples import JoinedOutputs, Outputs
from ._parts import Chunk, StepParts

Output = TypeVar("Output")
Gradients = Sequence[Tensor | None]


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
        two_passes(self._parts, len(self._chunks), self._forward, self._differentiate)
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
            parts.backward.run([parts.backward.scaled(loss)], [None], joined.roots)
        return joined.gradients()


def two_passes(
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
        torch.no_grad(),
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
    for i, random_state in enumerate(drawn):
        # a chunk that the loss does not depend on has nothing to learn
        if any(gradient is not None for gradient in gradients[i]):
            random_state.undo()
            parts.send_back(forward(i)[1], gradients[i])
    at_end.undo()
    end.undo()
