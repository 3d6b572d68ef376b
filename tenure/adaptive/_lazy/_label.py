"""Where a tensor has its samples."""

from __future__ import annotations

from typing import NamedTuple


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

    def size(self, n_samples: int) -> int:
        """The size of the dimension for so many samples."""
        return self.outer * n_samples * self.inner


SHARED = Label()
