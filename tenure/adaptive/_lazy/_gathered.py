"""Values of parts of the batch, put together; batches taken apart the same way."""

from __future__ import annotations

import torch
from torch import Tensor

from tenure.scopes import persist

from ._labels import Label


def is_plain(label: Label) -> bool:
    """Whether each sample has one place in its dimension."""
    return label.outer == label.inner == 1


def with_samples_apart(value: Tensor, label: Label) -> tuple[Tensor, int]:
    """A tensor with a dimension of its own for the samples, and that dimension."""
    if is_plain(label):
        return value, label.dim
    n = value.shape[label.dim] // (label.outer * label.inner)
    return value.unflatten(label.dim, (label.outer, n, label.inner)), label.dim + 1


def with_samples_back(value: Tensor, label: Label) -> Tensor:
    """What `with_samples_apart` was given."""
    return value if is_plain(label) else value.flatten(label.dim, label.dim + 2)


class Gathered:
    """A value of the whole batch that grows part by part.

    Args:
        label: where it has the samples.
        n_samples: how many there will be.
    """

    def __init__(self, label: Label, n_samples: int) -> None:
        self._label = label
        self._n_samples = n_samples
        self._parts: Tensor | None = None

    def add(self, value: Tensor, start: int, length: int) -> None:
        """Take the value of some samples."""
        value = value.detach()
        # what all samples share comes of any part
        if not self._label.is_batch:
            self._parts = value
            return
        # memory of all of it at once: parts and what is made of them would be there twice
        with torch.no_grad(), persist():
            apart, dim = with_samples_apart(value, self._label)
            if self._parts is None:
                shape = [*apart.shape[:dim], self._n_samples, *apart.shape[dim + 1 :]]
                self._parts = torch.empty(shape, dtype=value.dtype, device=value.device)
            self._parts.narrow(dim, start, length).copy_(apart)

    def value(self) -> Tensor:
        """All of it."""
        assert self._parts is not None
        return with_samples_back(self._parts, self._label) if self._label.is_batch else self._parts
