"""The bytes behind tensors, each storage counted once however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from tenure._errors import ScopeUsageError

from ._torch_swap import without_modes
from ._trees import tensors_in

_COMPRESSED_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages of a tensor of any layout; none where torch shows none (meta, opaque)."""
    with without_modes():
        return [part.untyped_storage() for part in _dense_parts(tensor) if not _is_hollow(part)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages of ``tensors``, shared ones once."""
    unique = {
        storage._cdata: storage.nbytes()
        for tensor in tensors
        for part in _with_inner(tensor)
        for storage in storages_of(part)
    }
    return sum(unique.values())


def _with_inner(tensor: Tensor) -> list[Tensor]:
    if type(tensor) is Tensor:
        return [tensor]
    try:
        return tensors_in((tensor,))
    except ScopeUsageError:  # a __tensor_flatten__ that raises hides what is inside
        return [tensor]


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
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
    except RuntimeError:  # wrapper subclasses and functorch's wrappers
        return True
