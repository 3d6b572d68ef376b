"""Bytes that are lent out in a storage of their own, and whether anything still holds some of them.

A variable, a view or a graph of autograd holds a tensor; what was made by `detach()`, `.data` or
NumPy holds no tensor of ours, but the storage that it lies in.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C import _to_dlpack as to_dlpack
from torch.utils.dlpack import from_dlpack

_ALONE_IN_C = 1
_lent: weakref.WeakValueDictionary[int, Lent] = weakref.WeakValueDictionary()
_n_uses = torch._C._storage_Use_Count


class Lent:
    """Some bytes of a plain uint8 tensor, in a storage of their own that keeps it alive.

    Args:
        memory: the tensor, which is contiguous.
        start: the first of the bytes.
        n_bytes: how many.

    Attributes:
        is_aliased: whether something was made of them that is written without raising a version.
        tensors: the names of the tensors that show them, by the ``id`` of each.
    """

    __slots__ = (
        "__weakref__",
        "_holder",
        "_n_holders",
        "_n_uses",
        "_tensor",
        "is_aliased",
        "tensors",
    )

    def __init__(self, memory: Tensor, start: int, n_bytes: int) -> None:
        self._tensor = in_own_storage(memory, start, start + n_bytes)
        self._holder = {0: self._tensor.untyped_storage()}
        self._n_uses, self._n_holders = self._counts()
        self.is_aliased = False
        self.tensors: dict[int, str] = {}
        _lent[self._holder[0]._cdata] = self

    @property
    def storage(self) -> UntypedStorage:
        """The storage, to make tensors over it."""
        return self._holder[0]

    def is_shared(self, n_tensors: int) -> bool:
        """Whether more than so many tensors lie in the storage, or something holds it.

        Whatever shows its bytes counts: tensors of any class, arrays of NumPy, capsules.
        """
        n_uses, n_holders = self._counts()
        return n_uses > self._n_uses + n_tensors or n_holders > self._n_holders

    def _counts(self) -> tuple[int, int]:
        return int(_n_uses(self._holder[0]._cdata)), _n_holders(self._holder, 0)


def in_own_storage(memory: Tensor, start: int, end: int) -> Tensor:
    """Some bytes of a plain uint8 tensor, in a storage of their own that keeps it alive."""
    # By DLPack: a storage that is made from an address alone would outlive the memory.
    part: Tensor = from_dlpack(to_dlpack(memory[start:end]))
    return part


def lent_to(tensor: Tensor) -> Lent | None:
    """What was lent out that a tensor lies in; None of what has no plain storage."""
    if not _lent:
        return None
    try:
        return _lent.get(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # wrapper subclasses, transforms, sparse ones
        return None


def is_held(holder: Mapping[Any, Tensor], key: Any) -> bool:
    """Whether ``holder[key]`` has another holder; views, saved tensors and containers count.

    A tensor that shares its storage alone is not seen: ask `Lent`.
    """
    tensor: Any = holder[key]
    n_in_c = tensor._use_count()
    del tensor
    return n_in_c > _ALONE_IN_C or _n_holders(holder, key) > _alone()


def _n_holders(holder: Mapping[Any, object], key: Any) -> int:
    return sys.getrefcount(holder[key])


@functools.cache
def _alone() -> int:
    return _n_holders({0: object()}, 0)


def works() -> bool:
    """Whether this torch lets a view, a graph and an alias be seen, and their end."""
    with torch.inference_mode(False), torch.enable_grad():
        return _sees_tensors() and _sees_storages()


def _sees_tensors() -> bool:
    holder = {0: torch.ones(2, 2, device="cpu")}
    seen = [is_held(holder, 0)]
    view = holder[0].t()
    seen.append(is_held(holder, 0))
    del view
    product = torch.ones(2, 2, requires_grad=True, device="cpu") * holder[0]
    seen.append(is_held(holder, 0))
    del product
    return [*seen, is_held(holder, 0)] == [False, True, True, False]


def _sees_storages() -> bool:
    bytes_lent = Lent(torch.arange(8, dtype=torch.uint8, device="cpu"), 2, 4)
    empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    tensor: Tensor = empty.set_(bytes_lent.storage)
    del empty
    seen = [bytes_lent.is_shared(0), bytes_lent.is_shared(1)]
    alias = tensor.detach()
    seen.append(bytes_lent.is_shared(1))
    del alias
    storage = tensor.untyped_storage()
    seen.append(bytes_lent.is_shared(1))
    del storage
    seen.append(bytes_lent.is_shared(1))
    return seen == [True, False, True, True, False] and tensor.tolist() == [2, 3, 4, 5]
