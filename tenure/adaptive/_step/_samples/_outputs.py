"""The outputs of chunks, put together for a loss that wants those of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor

from ._sample_tree import Leaf, SampleDims, SampleTree


class Outputs:
    """What the function returned for one chunk.

    Args:
        returned: a tensor, or a container of tensors and plain values.
        dims: where the samples are.
        n_samples: how many the chunk has.

    Attributes:
        tree: it, taken apart; an item of a list with one item a sample is no leaf.
        n_samples: how many the chunk has.
        tensors: the tensors of floating point in it, those in items too, which may get gradients.

    Raises:
        AdaptiveUsageError: a tensor has another number of samples, or can't be given a gradient.
    """

    def __init__(self, returned: Any, dims: SampleDims, n_samples: int) -> None:
        self.tree = _tree_of(returned, dims, "output")
        self.n_samples = n_samples
        for leaf in self.tree.leaves:
            if leaf.is_split and leaf.n_samples != n_samples:
                raise AdaptiveUsageError(
                    f"The function of step() got {n_samples} samples, and {leaf.path} has "
                    f"{leaf.n_samples}: {_described(leaf)}. A loss= of outputs needs one for each "
                    "sample. Say with out_dims= which dimension has the samples, or None where "
                    "all samples share the output."
                )
            # else it would be trained by nothing, and nobody would be told
            _refuse_hidden(leaf)
        self.tensors = [each for leaf in self.tree.leaves for each in _tensors_of(leaf)]

    def detached(self) -> Outputs:
        """Return the same, without graphs, so that only values are kept."""
        other = copy.copy(self)
        other.tree = self.tree.like([_detached(leaf) for leaf in self.tree.leaves])
        other.tensors = [each for leaf in other.tree.leaves for each in _tensors_of(leaf)]
        return other


class JoinedOutputs:
    """The outputs of all chunks as those of one batch.

    Args:
        chunks: the outputs, detached, in order.

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
        tree = first.like(values)
        self._chunks = chunks
        self._leaves = tree.leaves
        self.roots = [t.requires_grad_() for leaf in tree.leaves for t in _tensors_of(leaf)]
        self.value = tree.with_leaves(values)

    def gradients(self) -> list[list[Tensor | None]]:
        """Yield the gradients of each chunk's tensors; shared ones come with the first chunk."""
        found: list[list[Tensor | None]] = []
        start = 0
        for chunk in self._chunks:
            pairs = list(zip(self._leaves, chunk.tree.leaves, strict=True))
            found.append([g for whole, part in pairs for g in _parts(whole, part, chunk, start)])
            start += chunk.n_samples
        return found


def _parts(whole: Leaf, part: Leaf, chunk: Outputs, start: int) -> list[Tensor | None]:
    """Return the gradients of the tensors in a leaf of a chunk."""
    # the items of the whole are those of the chunks
    if whole.dim == "items":
        return [tensor.grad for tensor in _tensors_of(part)]
    gradients = [tensor.grad for tensor in _tensors_of(whole)]
    # what all samples share was passed on from the first chunk alone
    if whole.dim is None:
        return [None if start else gradient for gradient in gradients]
    return [
        None if gradient is None else gradient.narrow(whole.dim, start, chunk.n_samples)
        for gradient in gradients
    ]


def _joined(column: list[Leaf]) -> Any:
    first = column[0]
    values = [leaf.value for leaf in column]
    if isinstance(first.dim, int):
        return torch.cat(values, first.dim) if isinstance(first.value, Tensor) else _array(column)
    if first.dim == "items":
        return type(first.value)(item for value in values for item in value)
    # a mean over the chunk, such as a loss of the model's own, has no value for the whole batch
    if any(not _same(first.value, value) for value in values[1:]):
        raise AdaptiveUsageError(
            f"The function of step() returned an {first.path} without samples that differs from "
            f"one micro-batch to another: {_described(first)}. It is a reduction over the samples, "
            "which a loss= of outputs can't take. Return a value for each sample."
        )
    return first.value.detach() if isinstance(first.value, Tensor) else first.value


def _tree_of(value: Any, dims: SampleDims, name: str) -> SampleTree:
    """Taken apart as far as it goes: a tensor that is no leaf would get no gradient."""
    return SampleTree(value, dims, name=name, argument="out_dims", reaches=lambda _: True)


def _leaves_of_items(leaf: Leaf) -> list[Leaf]:
    return _tree_of(leaf.value, None, leaf.path).leaves


def _tensors_of(leaf: Leaf) -> list[Tensor]:
    """Return the tensors of floating point at a leaf, or in its items."""
    leaves = _leaves_of_items(leaf) if leaf.dim == "items" else [leaf]
    return [each.value for each in leaves if _is_differentiable(each.value)]


def _detached(leaf: Leaf) -> Any:
    if leaf.dim != "items":
        return leaf.value.detach() if isinstance(leaf.value, Tensor) else leaf.value
    items = _tree_of(leaf.value, None, leaf.path)
    return items.with_leaves([_detached(each) for each in items.leaves])


def _refuse_hidden(leaf: Leaf) -> None:
    """Make sure that no tensor is out of reach that should get a gradient.

    Raises:
        AdaptiveUsageError: one is.
    """
    for each in _leaves_of_items(leaf) if leaf.dim == "items" else [leaf]:
        # `ModelOutput` and dataclasses are taken apart; a plain object is not
        held = {} if isinstance(each.value, Tensor) else getattr(each.value, "__dict__", {})
        if any(isinstance(v, Tensor) and v.grad_fn is not None for v in held.values()):
            raise AdaptiveUsageError(
                f"The function of step() returned an {each.path} that is a "
                f"{type(each.value).__name__} with a tensor that needs a gradient, and it can't be "
                "taken apart. Register it with torch.utils._pytree, or return the tensors in it."
            )


def _array(column: list[Leaf]) -> Any:
    import numpy as np

    return np.concatenate([leaf.value for leaf in column], column[0].dim)  # type: ignore[arg-type]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and torch.equal(a, b))
    if a is b or type(a) is not type(b):
        return a is b
    if hasattr(a, "__array_interface__"):
        return a.shape == b.shape and bool((a == b).all())
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        # of what it holds, that has no one truth value
        return False


def _check_structure(first: SampleTree, other: SampleTree) -> None:
    # by paths: lists of other lengths and dicts with other keys can't be concatenated
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
