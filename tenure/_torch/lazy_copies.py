"""torch's copies on write: a copy that takes memory only when one of the two is written.

The one that is written moves to other memory then. Nobody else may have its address: a NumPy array
or another tensor over the same storage would still read the old memory. So only what has a storage
to itself is copied like this. And only on the CPU: on CUDA torch moves the memory on the default
stream (``copy_data`` of CUDACachingAllocator.cpp), and work on another would not wait.

Source: ``c10::impl::cow`` of PyTorch; ``test_cow_input`` holds that operators read without copying.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C
_torch: Any = torch
_ALONE = 2
"""Uses of a storage with one tensor, while a Python object asks."""


def lazy_copy(tensor: Tensor) -> Tensor | None:
    """A copy that takes no memory yet, made below all modes; None where that is not safe."""
    if (
        type(tensor) is not Tensor
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_inference()
        or _C._storage_Use_Count(tensor.untyped_storage()._cdata) != _ALONE
    ):
        return None
    try:
        copy: Tensor = _torch._lazy_clone(tensor)
    except RuntimeError:  # memory that is shared with other processes, or of another library
        return None
    return copy


def share_memory(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a tensor still lies where it did when its lazy copy was made, so is as it was.

    It has moved if it was written, or if its address was taken, which compiled code does.
    """
    return bool(_C._data_address(tensor) == _C._data_address(copy))


def works() -> bool:
    """Whether what is written moves away from its lazy copy, and only then."""
    tensor = torch.zeros(2)
    copy = lazy_copy(tensor)
    if copy is None or not share_memory(tensor, copy):
        return False
    tensor.add_(1)
    return not share_memory(tensor, copy) and copy.tolist() == [0, 0] and tensor.tolist() == [1, 1]
