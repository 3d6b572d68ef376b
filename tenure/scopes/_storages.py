"""The bytes behind tensors, each storage counted once however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tenure._storages import storages_of

from ._trees import tensors_in


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages of ``tensors``, shared ones once."""
    unique = {
        storage._cdata: storage.nbytes()
        for tensor in tensors_in(tensors)
        for storage in storages_of(tensor)
    }
    return sum(unique.values())
