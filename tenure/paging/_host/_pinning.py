"""Host memory that a device copies from while it computes: private, pinned, and given back.

Invariant: memory is pinned where it is, if the device can, so that it is never there twice, nor
rounded up. What can't be pinned works, and copies from it wait. An error that pinning leaves behind
is taken back at once, and one that was there before is raised before anything is pinned.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from typing import Any

import torch

from tenure._callers import warn_user
from tenure._errors import PagingWarning
from tenure._text import format_bytes
from tenure._torch.quiet import aside, aside_with_subclasses

_logger = logging.getLogger("tenure")

Memory = Any
"""What offers Python's buffer protocol; collections.abc.Buffer is of Python 3.12."""


class Pinning:
    """Makes memory that is pinned for a device, until that is undone.

    Args:
        device: the device, with its index. All is done with it as the current one: whichever is
            current else would be given a context, and hundreds of megabytes with it.
        advice: what the user may do beside freeing memory.

    Raises:
        torch.AcceleratorError: an earlier call of the user's has left an error behind on this
            thread.

    Source: cudaHostRegister, https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
    """

    def __init__(self, device: torch.device, advice: str = "") -> None:
        self._device, self._advice = device, advice
        self._module = torch.get_device_module(device)
        self._runtime = _runtime_of(self._module)
        # Keeps it: what is pinned must not be let go.
        self._pinned: dict[int, Memory] = {}
        self._failed = False
        self.n_bytes = 0
        pending = self._take_error() if self._runtime else None
        if pending is not None:
            pending.add_note(
                "This error was there before paging did anything: an earlier call of the device's "
                "runtime has failed on this thread, and nobody has looked at its code."
            )
            raise pending

    def memory(self, n_bytes: int) -> Memory:
        """Memory of our own, pinned; or not, of which a warning tells once."""
        # Most likely the limit of locked memory is reached: each try would leave an error behind.
        if self._failed:
            return private_memory(n_bytes)
        with self._module.device(self._device):
            return self._in_place(n_bytes) if self._runtime else self._by_allocator(n_bytes)

    def release(self, memory: Memory) -> None:
        """Unpin memory that no copy reads any more; who uses it keeps it as ordinary memory."""
        address = _address_of(memory)
        if address in self._pinned:
            self._unpin([address])
        # by torch's allocator it is pinned as long as somebody has it
        elif hasattr(memory, "tensor"):
            self.n_bytes -= len(memory)

    def undo(self) -> None:
        """Unpin all of it that was pinned in place; it may be on any thread, for garbage."""
        self._unpin([*self._pinned])
        self.n_bytes = 0

    def _unpin(self, addresses: list[int]) -> None:
        failed_code = 0
        with self._module.device(self._device):
            for address in addresses:
                self.n_bytes -= len(self._pinned.pop(address))
                # On with the others, whatever one of them says: what stays locked is lost to the
                # machine.
                failed_code = int(self._runtime.cudaHostUnregister(address)) or failed_code
        if failed_code:
            self._take_error()
            _logger.warning(
                "Host memory that was pinned for paging could not be unpinned on %s (the driver "
                "says %d): it may stay locked until the process ends. If an error of an earlier "
                "call was pending on this thread, it is lost with this one.",
                self._device,
                failed_code,
            )

    def _in_place(self, n_bytes: int) -> Memory:
        memory = private_memory(n_bytes)
        address = _address_of(memory)
        code = int(self._runtime.cudaHostRegister(address, n_bytes, 0))
        if code == 0:
            self._pinned[address] = memory
            self.n_bytes += n_bytes
        else:
            self._take_error()
            self._fail(n_bytes, f"the driver says {code}")
        return memory

    def _by_allocator(self, n_bytes: int) -> Memory:
        """Memory of torch's own allocator: pinned as long as anything lies in it."""
        try:
            with aside():
                tensor = torch.zeros(n_bytes, dtype=torch.uint8, device="cpu").pin_memory()
        except RuntimeError as error:
            self._fail(n_bytes, str(error).partition("\n")[0])
            return private_memory(n_bytes)
        memory: Any = (ctypes.c_ubyte * n_bytes).from_address(tensor.data_ptr())
        # Keeps it.
        memory.tensor = tensor
        self.n_bytes += n_bytes
        return memory

    def _take_error(self) -> torch.AcceleratorError | None:
        """Take this thread's last error away.

        torch's binding only returns the code of a runtime function. The error stays behind, and the
        next kernel launch, of whomever, would raise it: "CUDA error: out of memory". No function
        of torch takes it away but the check of a launch, so this launches one.
        """
        try:
            with self._module.device(self._device), aside_with_subclasses():
                torch.empty(1, device=self._device).add_(1)
        except torch.OutOfMemoryError:
            # No room even for that: then the allocator has taken it away.
            return None
        except torch.AcceleratorError as error:
            return error
        return None

    def _fail(self, n_bytes: int, why: str) -> None:
        self._failed = True
        warn_user(
            f"{format_bytes(n_bytes)} of host memory could not be pinned ({why}), nor will "
            "what follows be. Copies from it are slower and don't overlap with computation. Free "
            f"host memory, or raise its limit of locked memory{self._advice}.",
            PagingWarning,
        )


def private_memory(n_bytes: int) -> Memory:
    """Zeroed memory of whole pages, which no forked process shares."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return (ctypes.c_ubyte * n_bytes)()


def _address_of(memory: Memory) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _runtime_of(module: Any) -> Any:
    """Return the runtime that pins memory in place; None where a device has none, as XPU."""
    runtime = module.cudart() if hasattr(module, "cudart") else None
    both = ("cudaHostRegister", "cudaHostUnregister")
    return runtime if all(hasattr(runtime, name) for name in both) else None
