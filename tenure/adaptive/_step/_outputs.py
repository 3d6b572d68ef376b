"""The outputs of chunks, put together for a loss that wants those of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._storages import storage_of
from tenure._text import describe_tensor
from tenure._torch.storages import byte_range, key_of
from tenure._torch.writes import version_of

from ._loss import copied
from ._samples import Leaf, SampleDims, SampleTree


class Outputs:
    """The outputs that the function returned for one chunk.

    Args:
        returned: a tensor, or a container of tensors and plain values.
        dims: where the samples are.
        n_samples: how many the chunk has.

    Attributes:
        tree: it, taken apart as far as it goes: a tensor that is no leaf would get no gradient.
        n_samples: how many the chunk has.
        tensors: the tensors of floating point in it, which may get gradients.

    Raises:
        AdaptiveUsageError: a tensor has another number of samples, or can't be given a gradient.
    """

    def __init__(self, returned: Any, dims: SampleDims, n_samples: int) -> None:
        self.tree = SampleTree(returned, dims, name="output", argument="out_dims", is_deep=True)
        self.n_samples = n_samples
        for leaf in self.tree.leaves:
            _refuse_without_gradient(leaf)
            if leaf.dim is not None and leaf.n_samples != n_samples:
                several, is_odd = divmod(leaf.n_samples, n_samples)
                chunks = f" {several} for each are {several} outputs, as chunk({several}) gives."
                raise AdaptiveUsageError(
                    f"The function of step() got {n_samples} samples, and {leaf.path} has "
                    f"{leaf.n_samples}: {_described(leaf)}. A loss= of outputs needs one for each "
                    "sample. Say with out_dims= which dimension has the samples, or None where "
                    f"all samples share the output.{'' if is_odd or several < 2 else chunks}"
                )
        self.tensors = differentiable(self.tree)
        self.alike = _in_memory_of_others(self.tree)

    def detached(self) -> Outputs:
        """Return copies without graphs: the function may compute the next ones in the same memory.

        A parameter, which nothing writes meanwhile, is not copied.
        """
        other = copy.copy(self)
        other.tree = self.tree.like([_kept(leaf.value) for leaf in self.tree.leaves])
        other.tensors = differentiable(other.tree)
        return other


class JoinedOutputs:
    """The outputs of all chunks as those of one batch.

    Args:
        chunks: the outputs, detached, in order.

    Attributes:
        value: a container like that of one chunk; its tensors of floating point require grad.
        roots: the leaves that get their gradients.

    Raises:
        AdaptiveUsageError: the chunks differ in structure, or in what they share.
    """

    def __init__(self, chunks: Sequence[Outputs]) -> None:
        first = chunks[0].tree
        for chunk in chunks[1:]:
            # by paths: lists of other lengths and dicts with other keys can't be concatenated
            if first.structure != chunk.tree.structure:
                raise AdaptiveUsageError(
                    f"The function of step() returned {', '.join(first.structure)} for one "
                    f"micro-batch and {', '.join(chunk.tree.structure)} for another. Return the "
                    "same structure for each."
                )
        columns = zip(*[chunk.tree.leaves for chunk in chunks], strict=True)
        tree = first.like([_joined(list(column)) for column in columns])
        self._lengths = [chunk.n_samples for chunk in chunks]
        self._dims = [leaf.dim for leaf in tree.leaves if _is_differentiable(leaf.value)]
        self.roots = [tensor.requires_grad_() for tensor in differentiable(tree)]
        with torch.enable_grad():
            values = [leaf.value for leaf in tree.leaves]
            apply: Any = _HandOn.apply
            handed = [apply(v) if _is_differentiable(v) else v for v in values]
        self.value = tree.with_leaves(handed)
        self._alike = [(tree.leaves[i].path, handed[i]) for i in chunks[0].alike]

    def loss_by(self, loss: Callable[[Any], Tensor]) -> Tensor:
        """Return the loss of the outputs.

        Raises:
            AdaptiveUsageError: the loss has written into an output that lies in the memory of
                another one: here each has its own.
        """
        versions = [version_of(tensor) for _, tensor in self._alike]
        value = loss(self.value)
        for (path, tensor), version in zip(self._alike, versions, strict=True):
            if version_of(tensor) != version:
                raise AdaptiveUsageError(
                    f"loss= of step() has written in place into {path}, which the function "
                    "returned in the memory of another output. Of a batch that is split, each "
                    "output has its own, so the other one would keep its values. Nothing was "
                    "changed. Write into a clone()."
                )
        return value

    def gradients(self) -> list[list[Tensor | None]]:
        """Return the gradients of each chunk's tensors; shared ones come with the first chunk."""
        found: list[list[Tensor | None]] = [[] for _ in self._lengths]
        for root, dim in zip(self.roots, self._dims, strict=True):
            start = 0
            for each, length in zip(found, self._lengths, strict=True):
                if root.grad is None or not isinstance(dim, int):
                    # what all samples share was passed on from the first chunk alone
                    each.append(None if start else root.grad)
                else:
                    each.append(root.grad.narrow(dim, start, length))
                start += length
        return found


def _in_memory_of_others(tree: SampleTree) -> list[int]:
    """Return the leaves that lie in the memory of another one."""
    there: dict[int, list[tuple[int, int, int]]] = {}
    for i, leaf in enumerate(tree.leaves):
        if isinstance(leaf.value, Tensor) and (storage := storage_of(leaf.value)) is not None:
            start, end = byte_range(leaf.value) if leaf.value.numel() else (0, 0)
            there.setdefault(key_of(storage), []).append((start, end, i))
    found: set[int] = set()
    for places in there.values():
        # the one that reaches farthest of those before
        last, reached = -1, 0
        for start, end, i in sorted(places):
            if start < reached and start < end:
                found |= {last, i}
            if end > reached:
                last, reached = i, end
    return sorted(found)


def _kept(value: Any) -> Any:
    is_trained = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return value.detach() if is_trained else copied(value)


class _HandOn(torch.autograd.Function):
    """Hands a leaf on as what a function has computed, which a loss may write in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


def _joined(column: list[Leaf]) -> Any:
    first = column[0]
    values = [leaf.value for leaf in column]
    if isinstance(first.dim, int):
        return torch.cat(values, first.dim)
    # a mean over the chunk, such as a loss of the model's own, has no value for the whole batch
    if any(not _same(first.value, value) for value in values[1:]):
        raise AdaptiveUsageError(
            f"The function of step() returned an {first.path} without samples that differs from "
            f"one micro-batch to another: {_described(first)}. It is a reduction over the samples, "
            "which a loss= of outputs can't take. Return a value for each sample."
        )
    return first.value.detach() if isinstance(first.value, Tensor) else first.value


def _refuse_without_gradient(leaf: Leaf) -> None:
    """Make sure that no tensor is out of reach that should get a gradient.

    Raises:
        AdaptiveUsageError: one may be.
    """
    if isinstance(leaf.value, Tensor):
        return
    kind = type(leaf.value)
    if leaf.dim is not None or hasattr(kind, "__array_interface__"):
        raise AdaptiveUsageError(
            f"The function of step() returned an {leaf.path} that is a {kind.__name__}, of whose "
            "items a loss= of outputs gives no gradients. Return tensors with a row for each "
            "sample."
        )
    # `ModelOutput` and dataclasses are taken apart; a plain object is not
    held = getattr(leaf.value, "__dict__", {})
    if any(isinstance(v, Tensor) and v.grad_fn is not None for v in held.values()):
        raise AdaptiveUsageError(
            f"The function of step() returned an {leaf.path} that is a {kind.__name__} with a "
            "tensor that needs a gradient, and it can't be taken apart. Register it with "
            "torch.utils._pytree, or return the tensors in it."
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and torch.equal(a, b))
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except (RuntimeError, TypeError, ValueError):
        # of what it holds, that has no one truth value
        return False


def differentiable(tree: SampleTree) -> list[Tensor]:
    """Return the tensors that may get gradients, of floating point or complex, in order."""
    return [leaf.value for leaf in tree.leaves if _is_differentiable(leaf.value)]


def _is_differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _described(leaf: Leaf) -> str:
    value = leaf.value
    return describe_tensor(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"
