"""The storages behind a tensor of any layout, their bytes, and what a wrapper is made of.

No mode and no override of a subclass sees the questions asked here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._torch.quiet import TENSOR_BASE, without_functions
from tenure._torch.storages import coo_parts, key_of

_COMPRESSED: dict[Any, tuple[str, ...]] = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that give the dense tensors which a compressed sparse one is made of."""


def storage_of(t: Tensor) -> UntypedStorage | None:
    """Return the storage; None for a tensor without one."""
    # sparse, opaque, nested, wrapped and disposed tensors raise errors of many types here
    try:
        storage: UntypedStorage = TENSOR_BASE.untyped_storage(t)
    except Exception:
        return None
    return storage


def storage_key(t: Tensor) -> int | None:
    """Return the identity of the storage while it lives; None for a tensor without one."""
    storage = storage_of(t)
    return None if storage is None else key_of(storage)


def storage_bytes(t: Tensor) -> int | None:
    """Return the bytes of the whole storage, whatever part of it the tensor shows."""
    try:
        return int(TENSOR_BASE.untyped_storage(t).nbytes())
    except Exception:
        return None


def element_bytes(t: Tensor) -> int:
    """Return the bytes of the elements that a tensor shows; 0 if they are not known."""
    try:
        return int(TENSOR_BASE.numel(t)) * int(TENSOR_BASE.element_size(t))
    except Exception:
        return 0


def n_bytes_of(t: Tensor) -> int:
    """Return the bytes of the storage, else of the elements, else 0."""
    n_bytes = storage_bytes(t)
    return element_bytes(t) if n_bytes is None else n_bytes


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, shared ones once."""
    found = {key_of(each): each for tensor in tensors for each in all_storages_of(tensor)}
    return sum(storage.nbytes() for storage in found.values())


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Return the storages of a tensor of any layout; none where torch shows none (meta, opaque)."""
    with without_functions():
        parts = [part for _, part in sparse_parts(tensor)]
        if not parts and tensor.layout is torch.strided:
            parts = [tensor]
        found = map(_storage_with_memory, parts)
        return [storage for storage in found if storage is not None]


def all_storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Return the storages of a tensor and of all inner tensors of wrappers, each once."""
    if type(tensor) is Tensor:
        return storages_of(tensor)
    # with the storages, not their sizes: a key is one storage's only as long as that lives
    found: dict[int, UntypedStorage] = {}
    # a wrapper may show itself, or make its parts anew: what was seen is kept, so its id is its own
    seen: dict[int, Tensor] = {}
    waiting = [tensor]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        found.update((key_of(storage), storage) for storage in storages_of(each))
        # a __tensor_flatten__ that raises hides what is inside
        with suppress(Exception):
            waiting += inner_tensors(each)
    return list(found.values())


def sparse_parts(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the dense tensors that a sparse one is made of, by name; none for other layouts."""
    if tensor.layout is torch.sparse_coo:
        return list(zip(("indices", "values"), coo_parts(tensor), strict=True))
    names = _COMPRESSED.get(tensor.layout, ())
    return [(name, getattr(tensor, name)()) for name in names]


def is_hollow(storage: UntypedStorage) -> bool:
    """Return whether a storage has a size but no memory, as of meta and fake tensors."""
    try:
        return storage.device.type == "meta" or storage.data_ptr() == 0
    except RuntimeError:
        return True


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the inner tensors of a wrapper subclass, such as a DTensor; else none."""
    return [inner for _, inner in named_inner_tensors(tensor)]


def named_inner_tensors(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the same with the attributes that they are; the code of the subclass is what tells."""
    if type(tensor) is Tensor or not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    with without_functions():
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inside = [(name, getattr(tensor, name)) for name in names]
    # a DTensor names its mesh too
    return [(name, inner) for name, inner in inside if isinstance(inner, Tensor)]


def _storage_with_memory(tensor: Tensor) -> UntypedStorage | None:
    storage = storage_of(tensor)
    if storage is None:
        return None
    # The address of a plain tensor is not asked for: the question makes a lazy copy a real one.
    has_none = storage.device.type == "meta" if type(tensor) is Tensor else is_hollow(storage)
    return None if has_none else storage
