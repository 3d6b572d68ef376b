"""Host memory that a device copies from while it computes: private to the process, and pinned.

Invariant: memory is pinned where it is, so that it is never there twice, nor rounded up; what can't
be pinned works, and copies from it wait.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from torch import Tensor

from tenure._errors import PagingWarning
from tenure._units import format_bytes
from tenure._warn import warn_user

Memory = Any
"""What offers Python's buffer protocol; collections.abc.Buffer is of Python 3.12."""


class Pinning:
    """Pins memory for a device, until it is undone.

    Args:
        module: the device's module.
        advice: what the user may do beside freeing memory.

    Source: cudaHostRegister, https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
    """

    def __init__(self, module: Any, advice: str = "") -> None:
        self._advice = advice
        self._runtime = module.cudart() if hasattr(module, "cudart") else None
        self._addresses: list[int] = []
        self._failed = False

    def pin(self, memory: Tensor) -> None:
        """Pin a tensor's memory, or warn once that it can't be."""
        if self._failed:
            return
        code = -1
        if self._runtime is not None:
            code = int(self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code == 0:
            self._addresses.append(memory.data_ptr())
            return
        self._failed = True
        why = "this device can't pin memory in place" if code == -1 else f"the driver says {code}"
        warn_user(
            f"{format_bytes(memory.nbytes)} of host memory could not be pinned ({why}), nor will "
            "what follows be. Copies from it are slower and don't overlap with computation. Free "
            f"host memory, or raise its limit of locked memory{self._advice}.",
            PagingWarning,
        )

    def undo(self) -> None:
        """Unpin all of it."""
        while self._addresses:
            self._runtime.cudaHostUnregister(self._addresses.pop())  # type: ignore[union-attr]


def private_memory(n_bytes: int) -> Memory:
    """Zeroed memory of whole pages, which no forked process shares."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return (ctypes.c_ubyte * n_bytes)()
