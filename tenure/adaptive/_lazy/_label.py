"""Where a tensor has its samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Label(NamedTuple):
    """The dimension that has the samples.

    Attributes:
        dim: the dimension; below zero if the tensor has the same shape for any number of samples.
        outer: how often that dimension runs through all samples.
        inner: how many elements in a row belong to one.
    """

    dim: int = -1
    outer: int = 1
    inner: int = 1

    @property
    def is_batch(self) -> bool:
        """Each sample has a part of the tensor."""
        return self.dim >= 0

    @property
    def sample_dim(self) -> int | None:
        """The dimension of the samples in the result of `apart`; None if there is none."""
        if not self.is_batch:
            return None
        return self.dim if self._is_plain else self.dim + 1

    @property
    def _is_plain(self) -> bool:
        return self.outer == self.inner == 1

    def size(self, n_samples: int) -> int:
        """The size of the dimension for so many samples."""
        return self.outer * n_samples * self.inner

    def apart(self, value: Tensor) -> Tensor:
        """Give the samples of a tensor a dimension of their own, if it has samples."""
        if self._is_plain:
            return value
        n = value.shape[self.dim] // (self.outer * self.inner)
        apart: Tensor = value.unflatten(self.dim, (self.outer, n, self.inner))
        return apart

    def back(self, value: Tensor) -> Tensor:
        """Undo `apart`."""
        return value if self._is_plain else value.flatten(self.dim, self.dim + 2)

    def part(self, value: Tensor, start: int, end: int) -> Tensor:
        """Return some samples of a tensor; all of it if it has none."""
        if self.sample_dim is None:
            return value
        return self.back(self.apart(value).narrow(self.sample_dim, start, end - start))

    def filled(self, whole: Tensor | None, part: Tensor, start: int, n_samples: int) -> Tensor:
        """Put the part from a sample on into all of a tensor, whose memory the first part makes."""
        dim = self.sample_dim
        if dim is None:
            return part
        apart = self.apart(part)
        if apart.shape[dim] == n_samples:
            return part
        if whole is None:
            shape = [*apart.shape[:dim], n_samples, *apart.shape[dim + 1 :]]
            whole = self.back(apart.new_empty(shape))
        self.apart(whole).narrow(dim, start, apart.shape[dim]).copy_(apart)
        return whole

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Join the parts of a tensor; what all samples share comes from the last one."""
        if self.sample_dim is None or len(parts) == 1:
            return parts[-1]
        return self.back(torch.cat([self.apart(part) for part in parts], self.sample_dim))


SHARED = Label()
