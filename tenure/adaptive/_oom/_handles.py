"""Libraries of CUDA that could not be begun, which may or may not be for want of memory.

A library takes the memory of its first handle from the driver, beside torch's allocator, and says
of a failure only that it is not initialized. The same is said where it was installed wrongly, or
where an earlier kernel has broken the device. So it counts only while little memory is free.
"""

from __future__ import annotations

import re

import torch

from ._rules import Oom

_LITTLE_BYTES = 1 << 29
"""What a handle and the kernels that come with it take at the most, generously."""
_HANDLE = re.compile(
    # cuSPARSE says what its status means, the others print its name
    r"\b(?:(?:CU|HIP|ROC)[A-Z]{2,10}_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|INSUFFICIENT_RESOURCES)"
    r"|insufficient resources|initialization error),? when calling "
    r"`(?:cu|hip|roc)\w{2,20}[cC]reate\w{0,20}\(&?handle\)"
    r"|\bcuDNN error: CUDNN_STATUS_NOT_INITIALIZED\b"
)
"""Source: the checks of ``aten/src/ATen/cuda/Exceptions.h``, and who calls them with a handle."""


def oom_of_handle(text: str) -> Oom | None:
    """What a library's failed handle is, by its text and by the memory that is free now."""
    if not _HANDLE.search(text):
        return None
    device = _device_with_little_free()
    return None if device is None else Oom("workspace", device)


def _device_with_little_free() -> str | None:
    """A device in use that is nearly full: the text names none, and the current one is any."""
    if not torch.cuda.is_initialized():
        return None
    for index in range(torch.cuda.device_count()):
        try:
            # of one without memory, asking would bring a context to life, which takes some
            if (
                torch.cuda.memory_reserved(index)
                and torch.cuda.mem_get_info(index)[0] < _LITTLE_BYTES
            ):
                return f"cuda:{index}"
        except Exception:  # a device that is broken tells nothing any more
            continue
    return None
