"""The storages behind a tensor of any layout, and the tensors that a wrapper is made of.

No mode and no override of a subclass sees the questions asked here.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from tenure._torch.quiet import without_functions
from tenure._torch.storages import sparse_parts

_COMPRESSED_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages of a tensor of any layout; none where torch shows none (meta, opaque)."""
    with without_functions():
        return [part.untyped_storage() for part in _dense_parts(tensor) if not _is_hollow(part)]


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass, such as a DTensor, is made of; none for other ones."""
    return [inner for _, inner in named_inner_tensors(tensor)]


def named_inner_tensors(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The same with the attributes that they are; the code of the subclass is what tells."""
    if type(tensor) is Tensor or not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    with without_functions():
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inside = [(name, getattr(tensor, name)) for name in names]
    # a DTensor names its mesh too
    return [(name, inner) for name, inner in inside if isinstance(inner, Tensor)]


def n_bytes_of(t: Tensor) -> int:
    """Bytes of the storage; without one, of the elements; 0 when neither can be told."""
    for measure in (_storage_bytes, _element_bytes):
        try:
            return measure(t)
        # a subclass may raise anything from its own overrides, and a description must not
        except Exception:
            continue
    return 0


def _storage_bytes(t: Tensor) -> int:
    return int(t.untyped_storage().nbytes())


def _element_bytes(t: Tensor) -> int:
    return int(t.numel()) * int(t.element_size())


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if layout in _COMPRESSED_BY_ROW:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in _COMPRESSED_BY_COLUMN:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor] if layout is torch.strided else []


def _is_hollow(tensor: Tensor) -> bool:
    """Whether its storage, if any, has a size but no memory: meta and fake tensors, wrappers."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return True
        return type(tensor) is not Tensor and storage.data_ptr() == 0
    except (RuntimeError, NotImplementedError):  # wrapper subclasses and functorch's wrappers
        return True
