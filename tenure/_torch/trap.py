"""A trap in a storage: while it is armed, C++ refuses to read or write it, and says why.

Builds of torch with CUDA have it, for storages of any device; others do not, and there a kernel
that is led past Python's checks reads a null pointer.

Source: ``custom_data_ptr_error_msg_`` of
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/StorageImpl.h
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import UntypedStorage

_C: Any = torch._C
_SET = "_set_storage_data_ptr_access_error_msg"
_CLEAR = "_clear_storage_data_ptr_access_error_msg"
_PROBE = "tenure tests whether this torch traps"


def arm(storage: UntypedStorage, message: str) -> None:
    """Make every access to the data of a storage raise a RuntimeError; nothing without traps."""
    if works():
        getattr(_C, _SET)(storage._cdata, message)


def disarm(storage: UntypedStorage) -> None:
    """Take the trap out."""
    if works():
        getattr(_C, _CLEAR)(storage._cdata)


@functools.cache
def works() -> bool:
    """Whether this torch has traps that can be set and taken out again."""
    if not (hasattr(_C, _SET) and hasattr(_C, _CLEAR)):
        return False
    probe = torch.zeros(1, device="cpu")
    key = probe.untyped_storage()._cdata
    try:
        getattr(_C, _SET)(key, _PROBE)
        try:
            probe.item()
        except RuntimeError as error:
            trapped = _PROBE in str(error)
        else:
            trapped = False
        getattr(_C, _CLEAR)(key)
        return trapped and probe.item() == 0
    except (RuntimeError, TypeError):
        return False
