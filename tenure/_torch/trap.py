"""A trap in a storage: while it is armed, C++ refuses to read or write it, and says why.

Builds of torch with CUDA have it, for storages of any device; others do not, and there a kernel
that is led past Python's checks reads a null pointer.

Source: ``custom_data_ptr_error_msg_`` of
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/StorageImpl.h
"""

from __future__ import annotations

from torch import UntypedStorage

from . import optional
from .storages import key_of

# builds without CUDA have neither
_SET = "torch._C._set_storage_data_ptr_access_error_msg"
_CLEAR = "torch._C._clear_storage_data_ptr_access_error_msg"


def arm(storage: UntypedStorage, message: str) -> None:
    """Make every access to the data of a storage raise a RuntimeError; nothing without traps."""
    if works():
        optional(_SET)(key_of(storage), message)


def disarm(storage: UntypedStorage) -> None:
    """Take the trap out."""
    if works():
        optional(_CLEAR)(key_of(storage))


def works() -> bool:
    """Return whether this torch has traps that can be set and taken out again."""
    return optional(_SET) is not None and optional(_CLEAR) is not None
