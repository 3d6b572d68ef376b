"""The shape of a recorded tensor, and where it has its samples.

Invariant: each size is known for any number of samples, also one that Python has computed with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


def names(text: str) -> frozenset[str]:
    """Return the names in a text, which white space separates."""
    return frozenset(text.split())


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
        return self.dim if self.outer == self.inner == 1 else self.dim + 1

    def size(self, n_samples: int) -> int:
        """Return the size of the dimension for so many samples."""
        return self.outer * n_samples * self.inner

    def apart(self, value: Tensor) -> Tensor:
        """Give the samples of a tensor a dimension of their own, if it has samples."""
        if self.outer == self.inner == 1:
            return value
        n = value.shape[self.dim] // (self.outer * self.inner)
        apart: Tensor = value.unflatten(self.dim, (self.outer, n, self.inner))
        return apart

    def back(self, value: Tensor) -> Tensor:
        """Undo `apart`."""
        is_plain = self.outer == self.inner == 1
        return value if is_plain else value.flatten(self.dim, self.dim + 2)

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

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of a tensor; what all samples share comes from the last one."""
        if self.sample_dim is None or len(parts) == 1:
            return parts[-1]
        return self.back(torch.cat([self.apart(part) for part in parts], self.sample_dim))


SHARED = Label()


class BatchInt(int):
    """A size that was computed from the number of samples.

    Attributes:
        at: gives the size for any number of samples.
    """

    at: Callable[[int], int]

    def __new__(cls, value: int, at: Callable[[int], int]) -> Self:
        made = super().__new__(cls, value)
        made.at = at
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def __neg__(self) -> BatchInt:
        return BatchInt(-int(self), lambda n: -self.at(n))


def _size_at(value: Any, n_samples: int) -> int:
    result: int = value.at(n_samples) if type(value) is BatchInt else value
    return result


def _remembering(apply: Callable[[int, int], int], *, reflected: bool) -> Callable[..., Any]:
    def method(self: BatchInt, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        value = apply(int(left), int(right))
        return BatchInt(value, lambda n: apply(_size_at(left, n), _size_at(right, n)))

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _prefix in ("", "r"):
        _method = _remembering(getattr(operator, _name), reflected=bool(_prefix))
        setattr(BatchInt, f"__{_prefix}{_name}__", _method)


@dataclass(frozen=True, eq=False, slots=True)
class Meta:
    """The properties of a tensor that are known without its data; one object for equal ones."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    label: Label

    @property
    def size(self) -> torch.Size:
        """The shape, with sizes that know how they depend on the batch."""
        sizes, label = list(self.shape), self.label
        if label.is_batch:
            sizes[label.dim] = BatchInt(sizes[label.dim], label.size)
        return torch.Size(sizes)

    def shape_at(self, n_samples: int) -> list[int]:
        """Return the shape that it has of another number of samples."""
        sizes, label = list(self.shape), self.label
        if label.is_batch:
            sizes[label.dim] = label.size(n_samples)
        return sizes


_interned = lru_cache(8192)(Meta)


def meta_of(tensor: Any, label: Label) -> Meta:
    """Describe a tensor with the samples in a dimension."""
    return _interned(
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
        tensor.is_leaf, label,
    )  # fmt: skip
