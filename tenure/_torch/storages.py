"""What torch keeps to itself about storages: which is which, who uses one, and where it was sent.

A use is a tensor, or another owner in C++; the Python object of the storage is one while it asks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from . import bound, getter
from .modes import EagerMode
from .quiet import without_functions

_ALL = "everything that tells storages apart"
key_of: Callable[[UntypedStorage], int] = getter("torch.UntypedStorage._cdata", _ALL)
"""The address of a storage in C++: its identity while it lives, whatever Python object shows it."""
_use_count: Any = bound(
    "torch._C._storage_Use_Count", "paging, memory_budget(), the state of a step and who holds what"
)
_tensor_use_count = bound(
    "torch.Tensor._use_count", "paging, who holds what, memory_budget() and predictions of memory"
)
_indices = bound("torch.Tensor._indices", "sparse tensors")
_values = bound("torch.Tensor._values", "sparse tensors")
_ALONE_IN_C = 1
SET = torch.ops.aten.set_.source_Storage
"""The operation that puts a storage in a tensor."""
_REDUCTIONS = "torch.multiprocessing.reductions"


def n_uses(storage: UntypedStorage) -> int:
    """Return how many owners in C++ use a storage, the object that asks among them."""
    return int(_use_count(key_of(storage)))


def owners_of_storage(storage: UntypedStorage) -> int:
    """Return how many owners in C++ share a storage, not counting its Python object."""
    return n_uses(storage) - 1


def uses_of_tensor(tensor: Tensor) -> int:
    """Return how many owners a tensor has in C++, its Python handle among them."""
    return int(_tensor_use_count(tensor))


def coo_parts(tensor: Tensor) -> list[Tensor]:
    """Return the indices and values of a COO tensor, also where it is not coalesced."""
    return [_indices(tensor), _values(tensor)]


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the byte range of a strided tensor in its storage: the first byte, and the end.

    It has at least one element.
    """
    with without_functions():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((n - 1) * step for n, step in steps)
        first, n_bytes = int(tensor.storage_offset()), tensor.element_size()
        return first * n_bytes, (first + int(reach) + 1) * n_bytes


def shared_keys() -> frozenset[int]:
    """Return the storages that this process got from, or gave to, another one through torch."""
    # where torch has not imported it, nothing can have been shared
    reductions: Any = sys.modules.get(_REDUCTIONS)
    if reductions is None:
        return frozenset()
    return frozenset(ref.cdata for ref in list(reductions.shared_cache.values()))


@functools.cache
def uses_by_torch(inference: bool) -> int:
    """Return how often torch itself uses a storage on its way to the handler of ``set_``.

    To be asked outside of handlers. A mode above the handler adds one, a tensor in the storage too.
    """
    probe = UseProbe(SET, lambda args: n_uses(args[1]))
    with torch.inference_mode(inference), probe:
        _put_in_a_tensor(UntypedStorage(1))
    return probe.n_uses


def is_in_a_tensor(storage: UntypedStorage, inference: bool, n_modes_above: int) -> bool:
    """Return whether a tensor lies in ``storage``, asked in the handler of ``set_``."""
    return n_uses(storage) > uses_by_torch(inference) + n_modes_above


def is_held(holder: Mapping[Any, Tensor], key: Any) -> bool:
    """Return whether ``holder[key]`` has another holder; views, saved tensors and containers count.

    A tensor that shares its storage alone is not seen: ask `tenure._torch.lending.Lent`.
    """
    tensor = holder[key]
    n_in_c = uses_of_tensor(tensor)
    # a variable of this function would count as a holder
    del tensor
    return n_in_c > _ALONE_IN_C or n_holders(holder, key) > _alone()


def n_holders(holder: Mapping[Any, object], key: Any) -> int:
    """Return how many references Python has to ``holder[key]``, this call's among them."""
    return sys.getrefcount(holder[key])


@functools.cache
def _alone() -> int:
    return n_holders({0: object()}, 0)


class UseProbe(EagerMode):
    """Notes how often an argument of an operation was used when the handler got it.

    Args:
        operation: the operation.
        count: counts the uses, given the arguments.
    """

    def __init__(self, operation: Any, count: Callable[[Any], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self.n_uses = 0
        self._operation, self._count = operation, count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._operation:
            self.n_uses = self._count(args)
        return func(*args, **(kwargs or {}))


def _put_in_a_tensor(storage: UntypedStorage) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    tensor: Tensor = empty.set_(storage)
    return tensor
