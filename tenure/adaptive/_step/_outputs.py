"""The outputs of chunks, put together for a loss that wants those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tenure._describe import describe_tensor
from tenure._errors import AdaptiveUsageError

from ._sample_tree import Leaf, SampleDims, SampleTree


class Outputs:
    """What the function returned for one chunk.

    Args:
        returned: a tensor, or a container of tensors and plain values.
        dims: where the samples are.
        n_samples: how many the chunk has.

    Attributes:
        tensors: the tensors of floating point in it, which may get gradients.

    Raises:
        AdaptiveUsageError: a tensor has another number of samples.
    """

    def __init__(self, returned: Any, dims: SampleDims, n_samples: int) -> None:
        self.tree = SampleTree(returned, dims, name="output", argument="out_dims")
        for leaf in self.tree.leaves:
            if leaf.is_split and leaf.n_samples != n_samples:
                raise AdaptiveUsageError(
                    f"The function of step() got {n_samples} samples, and {leaf.path} has "
                    f"{leaf.n_samples}: {_described(leaf)}. A loss= of outputs needs one for each "
                    "sample. Say with out_dims= which dimension has the samples, or None where "
                    "all samples share the output."
                )
        self.tensors = [leaf.value for leaf in self.tree.leaves if _is_differentiable(leaf.value)]

    def detached(self) -> Outputs:
        """The same, without graphs, so that only values are kept."""
        values = [v.detach() if isinstance(v, Tensor) else v for v in self._values()]
        other = object.__new__(Outputs)
        other.tree = self.tree.like(values)
        other.tensors = [value for value in values if _is_differentiable(value)]
        return other

    def _values(self) -> list[Any]:
        return [leaf.value for leaf in self.tree.leaves]


class JoinedOutputs:
    """The outputs of all chunks as those of one batch.

    Args:
        chunks: the outputs, in order.

    Attributes:
        value: a container like that of one chunk; its tensors of floating point require grad.
        roots: these tensors.

    Raises:
        AdaptiveUsageError: the chunks differ in structure, or in what they share.
    """

    def __init__(self, chunks: Sequence[Outputs]) -> None:
        first = chunks[0].tree
        for chunk in chunks[1:]:
            _check_structure(first, chunk.tree)
        columns = zip(*[chunk.tree.leaves for chunk in chunks], strict=True)
        values = [_joined(list(column)) for column in columns]
        self.roots = [value.requires_grad_() for value in values if _is_differentiable(value)]
        self._leaves = [leaf for leaf in first.leaves if _is_differentiable(leaf.value)]
        self._lengths = [
            [leaf.n_samples for leaf in chunk.tree.leaves if leaf.is_split][:1] for chunk in chunks
        ]
        self.value = first.with_leaves(values)

    def gradients(self) -> list[list[Tensor | None]]:
        """The gradients of each chunk's tensors; a shared one gets its whole in the first chunk."""
        found: list[list[Tensor | None]] = []
        start = 0
        for i, length in enumerate(self._lengths):
            n_samples = length[0] if length else 0
            found.append([self._part(k, i, start, n_samples) for k in range(len(self.roots))])
            start += n_samples
        return found

    def _part(self, k: int, chunk: int, start: int, n_samples: int) -> Tensor | None:
        gradient: Tensor | None = self.roots[k].grad
        dim = self._leaves[k].dim
        if gradient is None:
            return None
        if isinstance(dim, int):
            return gradient.narrow(dim, start, n_samples)
        return gradient if chunk == 0 else None


def _joined(column: list[Leaf]) -> Any:
    first = column[0]
    values = [leaf.value for leaf in column]
    if isinstance(first.dim, int):
        return torch.cat(values, first.dim) if isinstance(first.value, Tensor) else _array(column)
    if first.dim == "items":
        return type(first.value)(item for value in values for item in value)
    if any(not _same(first.value, value) for value in values[1:]):
        raise AdaptiveUsageError(
            f"The function of step() returned an {first.path} without samples that differs from "
            f"one micro-batch to another: {_described(first)}. It is a reduction over the samples, "
            "which a loss= of outputs can't take. Return a value for each sample."
        )
    return first.value.detach() if isinstance(first.value, Tensor) else first.value


def _array(column: list[Leaf]) -> Any:
    import numpy as np

    return np.concatenate([leaf.value for leaf in column], column[0].dim)  # type: ignore[arg-type]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)


def _check_structure(first: SampleTree, other: SampleTree) -> None:
    if first.structure != other.structure:
        raise AdaptiveUsageError(
            f"The function of step() returned {', '.join(first.structure)} for one micro-batch "
            f"and {', '.join(other.structure)} for another. Return the same structure for each."
        )


def _is_differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _described(leaf: Leaf) -> str:
    value = leaf.value
    return describe_tensor(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"
