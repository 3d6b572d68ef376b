"""The arguments of an operation without their data, made real again in any size.

See Note [Layouts in predictions], rules 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tenure._torch.fakes import negative_view

Tree = Any
"""Arguments or results: containers, with a `Layout` for each tensor."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a strided tensor that a kernel may allocate by."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @property
    def n_bytes(self) -> int:
        """The bytes from its first element to its last."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.stride, strict=True)
        return (1 + sum((n - 1) * s for n, s in pairs)) * self.dtype.itemsize

    def resized(self, shape: Sequence[int]) -> Layout:
        """Return another shape in the same order, with the same gaps and the same expansion."""
        stride = [0] * len(self.shape)
        extent, before = 1, 1
        # from the innermost dimension out; of equal strides the one of size 1 is the inner one
        for d in sorted(range(len(shape)), key=lambda d: (self.stride[d], self.shape[d], -d)):
            if not self.stride[d]:
                continue
            gap = max(1, -(-self.stride[d] // before))
            stride[d] = extent * gap
            before = self.stride[d] * max(1, self.shape[d])
            extent = stride[d] * max(1, shape[d])
        return replace(self, shape=tuple(shape), stride=tuple(stride))

    def tensor(self, device: str, whole: int) -> Tensor:
        """Make a tensor: numbers are 0.5, masks are true, whole numbers are ``whole``."""
        n = self.n_bytes // self.dtype.itemsize
        is_number = self.dtype.is_floating_point or self.dtype.is_complex
        value = 0.5 if is_number else True if self.dtype is torch.bool else whole
        flat = torch.full((n,), value, dtype=self.dtype, device=device)
        made = flat.as_strided(self.shape, self.stride)
        made = made.conj() if self.is_conj else made
        return negative_view(made) if self.is_neg else made


def layout_of(leaf: Any) -> Any:
    """Return the layout of a tensor, fake or not, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    flags = leaf.is_conj(), leaf.is_neg()
    return Layout(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, *flags)


def mapped(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    """Change every leaf of nested containers."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([mapped(each, change) for each in tree])
    if isinstance(tree, dict):
        return {key: mapped(each, change) for key, each in tree.items()}
    return change(tree)


def layouts(tree: Tree) -> Iterator[Layout]:
    """Iterate over the layouts in nested containers."""
    if isinstance(tree, Layout):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from layouts(each)


def total_bytes(tree: Tree) -> int:
    """Return the bytes of all layouts."""
    return sum(each.n_bytes for each in layouts(tree))
