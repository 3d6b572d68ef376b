"""The bytes behind tensors, each storage counted once however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tenure._errors import ScopeUsageError
from tenure._storages import storages_of
from tenure._torch.storages import key_of

from ._trees import tensors_in


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages of ``tensors``, shared ones once."""
    unique = {
        key_of(storage): storage.nbytes()
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
