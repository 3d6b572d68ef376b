"""Real tensors in the place of fake ones, of the same layout and of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """All of a tensor that a kernel may allocate by: no data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes from its first element to its last."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.stride, strict=True)
        return (1 + sum((n - 1) * s for n, s in pairs)) * self.dtype.itemsize

    def resized(self, shape: Sequence[int]) -> Layout:
        """Another shape in the same order, with the same gaps between rows, the same expansion."""
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
        return Layout(tuple(shape), tuple(stride), self.dtype)

    def tensor(self, whole: int) -> Tensor:
        """A real tensor: numbers are 0.5, masks true, and whole numbers as they are asked for."""
        n = self.n_bytes // self.dtype.itemsize if 0 not in self.shape else 0
        is_number = self.dtype.is_floating_point or self.dtype.is_complex
        value = 0.5 if is_number else True if self.dtype is torch.bool else whole
        flat = torch.full((n,), value, dtype=self.dtype, device="cpu")
        return flat.as_strided(self.shape, self.stride)


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a strided tensor, fake or not."""
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
