"""What a step's function gives for samples, without graphs: of a whole, of its parts, by term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._loss import ONLY, combined, finished_loss, terms_of, whole_loss, widened, widened_count
from .._samples import JoinedOutputs, Outputs
from .._split import Chunk, ChunkTerms, StepSetup

Values = dict[str, Tensor]


@contextmanager
def unseen(setup: StepSetup) -> Iterator[None]:
    """A block without graphs, whose changes of buffers, attributes and random state are undone."""
    setup.state.begin()
    try:
        with torch.no_grad(), setup.run.watching():
            yield
    finally:
        setup.state.undo()
        setup.state.finish()
        torch.clear_autocast_cache()  # weights that were cast without a graph get no gradient


def whole_values(setup: StepSetup) -> Values:
    """The loss of all samples in one piece, and its terms if there are several."""
    with unseen(setup):
        spec = setup.run.spec
        returned = spec.fn(setup.run.inputs.whole())
        if callable(spec.loss):
            return {ONLY: spec.loss(returned)}
        loss, terms = whole_loss(terms_of(returned, spec.loss), spec.then)
        return _with_loss(terms, loss)


def split_values(setup: StepSetup, sizes: Sequence[int]) -> Values:
    """The same of parts of these lengths."""
    with unseen(setup):
        spec = setup.run.spec
        chunks = [Chunk(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
        if callable(spec.loss):
            returned = [_outputs(setup, chunk) for chunk in chunks]
            return {ONLY: spec.loss(JoinedOutputs(returned).value)}
        parts = ChunkTerms(setup.run, chunks)
        each = [parts.of(i) for i in range(len(chunks))]
        terms = combined([one.detached().by_name for one in each], parts.shares, parts.reduction)
        return _with_loss(terms, finished_loss(terms, each[0].named, spec.then))


def sums(setup: StepSetup) -> Values:
    """What is a sum over samples, if the step is declared rightly: the parts of its terms."""
    with unseen(setup):
        spec, inputs = setup.run.spec, setup.run.inputs
        returned = spec.fn(inputs.whole())
        if callable(spec.loss):
            return {ONLY: spec.loss(returned)}
        terms = terms_of(returned, spec.loss)
        found: Values = {}
        weight = setup.n_samples if spec.weight is None else spec.weight(inputs.whole())
        for name, term in terms.by_name.items():
            if term.count is not None:
                found[f"{name}: sum"] = widened(term.value)
                found[f"{name}: count"] = torch.as_tensor(widened_count(term.count))
            else:
                found[name] = widened(term.value) * _factor(spec.loss, weight, name)
        return {name: torch.nan_to_num(value.double().cpu()) for name, value in found.items()}


def _factor(reduction: object, weight: Any, name: str) -> Any:
    if reduction == "sum":
        return 1
    return weight.get(name, 1) if hasattr(weight, "get") else weight


def _outputs(setup: StepSetup, chunk: Chunk) -> Outputs:
    returned = setup.run.spec.fn(setup.run.inputs.chunk(*chunk))
    return Outputs(returned, setup.run.spec.out_dims, chunk.length).detached()


def _with_loss(terms: Values, loss: Tensor) -> Values:
    return {ONLY: loss} if len(terms) == 1 else {**terms, ONLY: loss}
