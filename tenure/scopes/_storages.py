"""The bytes behind tensors, each storage counted once however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from ._torch_swap import without_modes
from ._trees import tensors_in

_COMPRESSED_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages of a tensor of any layout; none where torch shows none (meta, opaque)."""
    with without_modes():
        return [
            part.untyped_storage() for part in _dense_parts(tensor) if part.device.type != "meta"
        ]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages of ``tensors``, shared ones once."""
    unique = {
        storage._cdata: storage.nbytes()
        for tensor in tensors_in(tensors)
        for storage in storages_of(tensor)
    }
    return sum(unique.values())


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in _COMPRESSED_BY_ROW:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in _COMPRESSED_BY_COLUMN:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if layout is not torch.strided:
        return []
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # wrapper subclasses and functorch's wrappers
        return []
    return [tensor]
