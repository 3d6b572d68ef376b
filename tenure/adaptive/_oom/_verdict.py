"""The verdict on one exception by itself: what it can never be, then its type, then its text."""

from __future__ import annotations

import errno
import re
from enum import Enum
from typing import Final

import torch

from tenure._errors import OutOfRetriesError, TenureError

from ._registry import registered_oom
from ._rules import NEVER_TEXT, Oom, builtin_oom


class _Never(Enum):
    NEVER = "never"


NEVER: Final = _Never.NEVER
"""The verdict on what is no out-of-memory error, whatever stands below it in its chain."""

_DEVICE = Oom("device")
_HOST = Oom("host", "cpu")
_BROKEN_GROUP = Oom("device", retry_safe=False)
# cudaErrorMemoryAllocation and hipErrorOutOfMemory; torch sets error_code where C++ raises.
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_ALLOCATION = 2
# A build without torch.distributed has no such error.
_DIST_ERROR: type[RuntimeError] | tuple[()] = getattr(torch.distributed, "DistError", ())

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


def verdict_on(exc: BaseException, text: str) -> Oom | _Never | None:
    """What an exception is by itself: an out-of-memory error, never one, or None for neither."""
    kind = type(exc)
    if not issubclass(kind, Exception):
        return NEVER  # interrupts and exits, cancellations, and groups that hold one
    return _by_type(exc, text) or _never(kind, text) or _by_text(kind, text)


def _by_type(exc: BaseException, text: str) -> Oom | None:
    kind = type(exc)
    if issubclass(kind, torch.OutOfMemoryError):
        found = builtin_oom(text)  # not every allocator names the device in its first words
        return found if found is not None and found.kind == "device" else _DEVICE
    if issubclass(kind, MemoryError):
        return builtin_oom(text) or _HOST  # allocators of other libraries name the device
    if issubclass(kind, torch.AcceleratorError) and _number(exc, "error_code") == _ALLOCATION:
        return builtin_oom(text) or _DEVICE
    if issubclass(kind, OSError) and _number(exc, "errno") == errno.ENOMEM:
        return _HOST
    return None


def _never(kind: type[BaseException], text: str) -> _Never | None:
    if issubclass(kind, OutOfRetriesError):
        return None  # its cause tells
    if issubclass(kind, (TenureError, AssertionError)) or NEVER_TEXT.search(text):
        return NEVER
    return None


def _by_text(kind: type[BaseException], text: str) -> Oom | None:
    if not issubclass(kind, RuntimeError):
        return None
    if issubclass(kind, _DIST_ERROR) and "out of memory" in text:
        return _BROKEN_GROUP
    return registered_oom(text) or builtin_oom(text) or _oom_of_handle(text)


def _number(exc: BaseException, attribute: str) -> int | None:
    try:
        value = getattr(exc, attribute, None)
    # a subclass may raise anything from a property, and a verdict must not
    except Exception:
        return None
    return value if type(value) is int else None


def _oom_of_handle(text: str) -> Oom | None:
    """What a library of CUDA that could not be begun is, by its text and the memory free now.

    A library takes the memory of its first handle from the driver, beside torch's allocator, and
    says of a failure only that it is not initialized. The same is said where it was installed
    wrongly, or where an earlier kernel has broken the device. So it counts only while little memory
    is free.
    """
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
