"""Exact gradients of any loss on the outputs of chunks, with the graph of one chunk at a time.

The first pass runs without graphs and gives the outputs; the loss of all of them gives the gradient
of each; the second pass runs each chunk again, with the random numbers it had, and sends that
gradient back through it.

Invariant: buffers, attributes and random state end as after the first pass and the loss, as if
nothing had run twice.

Source: GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..._undo import Generator, ModuleState, RngState
from .._modules import StepModels, generators_of

Output = TypeVar("Output")
Gradients = Sequence[Tensor | None]


def two_passes(
    n_chunks: int,
    forward: Callable[[int], tuple[Output, Sequence[Tensor]]],
    loss_of: Callable[[list[Output]], Sequence[Gradients]],
    backward: Callable[[Sequence[Tensor], Gradients], object],
    *,
    models: StepModels,
    devices: Iterable[torch.device],
    generators: Sequence[Generator],
) -> None:
    """Run both passes.

    Args:
        n_chunks: how many there are.
        forward: runs chunk i; what ``loss_of`` gets of it, and the tensors that get gradients.
        loss_of: runs the loss backward to the outputs, and gives the gradients of each chunk's
            tensors; None for a tensor that gets none.
        backward: sends gradients back from tensors.
        models: what the chunks run.
        devices: whose random numbers they use.
        generators: others whose random numbers they use.
    """
    noted = functools.partial(_noted, list(devices), generators)
    states: list[RngState] = []
    outputs: list[Output] = []
    at_start = ModuleState(models.all, with_modes=False)
    at_end = ModuleState(models.all, with_modes=False)
    at_start.begin()
    with (
        torch.no_grad(),
        models.telling(at_start.add),
        models.telling(lambda new: states[-1].add(generators_of(new))),
    ):
        for i in range(n_chunks):
            states.append(noted())
            outputs.append(forward(i)[0])
    # Older versions of torch keep weights that were cast without a graph in autocast's cache, and
    # these get no gradient in the second pass: https://github.com/pytorch/pytorch/issues/158232.
    torch.clear_autocast_cache()
    gradients = loss_of(outputs)
    del outputs
    end = noted()
    at_end.begin()
    at_start.undo()
    for i, state in enumerate(states):
        if any(gradient is not None for gradient in gradients[i]):
            state.undo()
            backward(forward(i)[1], gradients[i])
    at_end.undo()
    end.undo()


def _noted(devices: list[torch.device], generators: Sequence[Generator]) -> RngState:
    state = RngState(devices, generators)
    state.begin()
    return state
