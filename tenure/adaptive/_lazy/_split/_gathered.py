"""Values of parts of the batch, put together; batches taken apart the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenure.scopes import persist

from .._label import Label


def sample_dim(label: Label) -> int | None:
    """The dimension of the samples in what `with_samples_apart` gives; None where it has none."""
    if not label.is_batch:
        return None
    return label.dim if _is_plain(label) else label.dim + 1


def with_samples_apart(value: Tensor, label: Label) -> Tensor:
    """A tensor with a dimension of its own for the samples, if it has samples."""
    if _is_plain(label):
        return value
    n = value.shape[label.dim] // (label.outer * label.inner)
    apart: Tensor = value.unflatten(label.dim, (label.outer, n, label.inner))
    return apart


def with_samples_back(value: Tensor, label: Label) -> Tensor:
    """What `with_samples_apart` was given."""
    return value if _is_plain(label) else value.flatten(label.dim, label.dim + 2)


def _is_plain(label: Label) -> bool:
    """Whether each sample has one place in its dimension, or it has no samples."""
    return label.outer == label.inner == 1


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
        dim = sample_dim(self._label)
        # what all samples share comes of any part
        if dim is None:
            self._parts = value
            return
        # memory of all of it at once: parts and what is made of them would be there twice
        with torch.no_grad(), persist():
            apart = with_samples_apart(value, self._label)
            if self._parts is None:
                shape = [*apart.shape[:dim], self._n_samples, *apart.shape[dim + 1 :]]
                self._parts = torch.empty(shape, dtype=value.dtype, device=value.device)
            self._parts.narrow(dim, start, length).copy_(apart)

    def value(self) -> Tensor:
        """All of it."""
        assert self._parts is not None
        return with_samples_back(self._parts, self._label)


class Total:
    """The value of a term over all samples."""

    def __init__(self) -> None:
        self._sum: Any = 0
        self._weight: Any = 0

    def add(self, value: Tensor, kind: str, weight: Any) -> None:
        """Take the value of some samples."""
        if kind == "sum":
            self._sum, self._weight = self._sum + value, 1
            return
        # of no valid label
        empty = weight == 0
        if isinstance(empty, Tensor):
            value = torch.where(empty, torch.zeros_like(value), value)
        self._sum = self._sum + value * weight
        self._weight = self._weight + weight

    def value(self) -> Tensor:
        """All of it."""
        total: Tensor = self._sum / self._weight
        return total
