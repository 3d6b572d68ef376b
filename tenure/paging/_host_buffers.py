"""The host's side: one flat buffer for each unit, pinned, which the parameters of the unit alias.

Invariant: the model's bytes are on the host once. A unit is copied into its buffer and its tensors
are pointed there before the next unit's buffer is made, and each tensor keeps a storage of its own.
Memory is pinned where it is, if the device can, so that it is never rounded up. If it can't be
pinned, copies from it wait. An error that pinning leaves behind is taken back at once, and one that
was there before is raised before anything is pinned.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._account import moved
from tenure._callers import warn_user
from tenure._errors import PagingError, PagingWarning
from tenure._registries import NamedTensor
from tenure._show import progress
from tenure._text import describe_tensor, format_bytes
from tenure._torch.quiet import aside, aside_with_subclasses
from tenure._torch.storages import byte_range, key_of

from ._tensors import Extent, HostTensor, Unit

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


HOST = "paged: host"
"""What reports of memory call the buffers; the model's tensors lie in them."""


class HostBuffers:
    """Buffers in ordinary memory, pinned in place where the device can.

    Args:
        device: the device, with its index.
        pin: whether to pin.
        advice: what to do where that is not possible.

    Raises:
        torch.AcceleratorError: an earlier call of the user's has left an error behind.
    """

    def __init__(self, device: torch.device, *, pin: bool, advice: str = "") -> None:
        self._bytes: dict[Unit, Tensor] = {}
        self._memory: dict[Unit, Memory] = {}
        # by unit, and the byte of its buffer at which they begin
        self._parts: dict[Unit, dict[int, weakref.ref[UntypedStorage]]] = {}
        self._pinning = Pinning(device, advice) if pin else None

    @property
    def host_bytes(self) -> int:
        """The buffers' bytes."""
        return sum(memory.nbytes for memory in self._bytes.values())

    @property
    def pinned_bytes(self) -> int:
        """How much of them is pinned."""
        return 0 if self._pinning is None else self._pinning.n_bytes

    def memory(self, n_bytes: int) -> Memory:
        """More memory such as the buffers are; it is pinned as long as they are."""
        return private_memory(n_bytes) if self._pinning is None else self._pinning.memory(n_bytes)

    def adopt(self, units: Iterable[Unit]) -> None:
        """Move the tensors of units into buffers; values, strides and identity stay."""
        todo = list(units)
        n_bytes = sum(unit.n_bytes for unit in todo)
        with progress("moving weights", n_bytes, in_bytes=True) as done:
            # One unit after the other: its old memory goes before the next buffer is made, so that
            # the host never holds the model twice.
            for unit in todo:
                self._adopt(unit)
                done(unit.n_bytes)

    def _adopt(self, unit: Unit) -> None:
        """Move the tensors of a unit into a new buffer; if interrupted, the next use does it."""
        memory = self.memory(unit.n_bytes)
        before = self._memory.get(unit)
        self._bytes.pop(unit, None)
        self._memory[unit], self._parts[unit] = memory, {}
        for extent, start in unit.starts():
            part = self._part(unit, extent, start)
            if extent.tensors[0].has_left:
                _bring_back(extent.tensors[0], part, start)
            else:
                _move(extent, part, start)
        self._bytes[unit] = torch.frombuffer(memory, dtype=torch.uint8, count=unit.n_bytes)
        if self._pinning is not None and before is not None:
            self._pinning.release(before)

    def bytes_of(self, unit: Unit) -> Tensor:
        """Return the buffer of a unit, with what was given other memory meanwhile back in it.

        Raises:
            PagingError: a tensor has another type, shape or device than when it was paged, or has
                memory of another one.
        """
        left = {
            host: (extent, start)
            for extent, start in unit.starts()
            for host in extent.tensors
            if host.has_left
        }
        for host, (extent, _) in left.items():
            _check_form(host, extent)
        if left:
            self._refuse_ties(left)
        parts = self._parts[unit]
        if unit not in self._bytes or any(parts[at]() is not None for _, at in left.values()):
            # Who has kept what was there, or has swapped two weights, finds it unchanged.
            self._adopt(unit)
        for host, (extent, start) in left.items():
            if host.has_left:
                _bring_back(host, self._part(unit, extent, start), start)
        return self._bytes[unit]

    def _refuse_ties(self, left: Iterable[HostTensor]) -> None:
        """Refuse tensors with memory of others: in buffers they would come apart.

        Raises:
            PagingError: there is one.
        """
        places: dict[int, list[tuple[HostTensor, int, int]]] = {}
        for host in left:
            key = key_of(host.tensor.untyped_storage())
            places.setdefault(key, []).append((host, *byte_range(host.tensor)))
        for other in (each for unit in self._parts for each in unit.tensors):
            there = places.get(key_of(other.tensor.untyped_storage()), ())
            low, high = byte_range(other.tensor) if there else (0, 0)
            for host, start, end in there:
                if host is not other and start < high and low < end:
                    raise PagingError(
                        f"{host.name!r} was given the memory of {other.name!r} while it is paged, "
                        "and would be separated from it. Call unpage(), tie them, and page the "
                        "model again; or give it a clone()."
                    )

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the buffers, and for each the storages of the model's tensors in it."""
        for unit, memory in list(self._bytes.items()):
            alive = (part() for part in list(self._parts[unit].values()))
            inside = tuple(storage for storage in alive if storage is not None)
            yield NamedTensor(memory, unit.name, HOST, inside)

    def close(self) -> None:
        """Unpin the buffers; the tensors of the model keep them as ordinary memory."""
        if self._pinning is not None:
            self._pinning.undo()
        self._parts.clear()
        self._bytes.clear()
        self._memory.clear()

    def _part(self, unit: Unit, extent: Extent, start: int) -> Tensor:
        """Return the bytes of an extent in the buffer of its unit, as a storage of their own."""
        # A storage of its own for each extent: torch.save writes whole storages, and the state dict
        # of a layer would have its whole unit in it.
        memory, n_bytes = self._memory[unit], extent.n_bytes
        part = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes, offset=start)
        self._parts[unit][start] = weakref.ref(part.untyped_storage())
        return part


def _move(extent: Extent, new: Tensor, start: int) -> None:
    """Copy an extent to its place in a buffer, and point its tensors there."""
    old = torch.empty(0, dtype=torch.uint8, device="cpu")
    moved(extent.tensors[0].tensor, new)
    new.copy_(old.set_(extent.storage, extent.low_byte, (extent.n_bytes,), (1,)))
    point_at(extent, new, start)


def point_at(extent: Extent, part: Tensor, start: int) -> None:
    """Let the tensors of an extent lie in other memory that holds the same bytes.

    Args:
        extent: the extent.
        part: uint8[extent.n_bytes], with a storage of its own.
        start: where the extent begins in its unit.
    """
    extent.low_byte = 0
    for host in extent.tensors:
        _point(host, part, start)


def _point(host: HostTensor, part: Tensor, start: int, *, keep_values: bool = False) -> None:
    """Let a tensor lie in a part of a buffer that begins at byte ``start`` of its unit."""
    tensor = host.tensor
    offset = (host.at_bytes - start) // tensor.element_size()
    # Given other memory it may have other strides, but the page on the device has those of the
    # first time.
    strides = tensor.stride() if not host.home else host.home_strides
    # Of the tensor's own kind, whatever mode the caller is in: with data made in inference mode a
    # tensor no longer counts its writes, and with other data one made there raises when asked.
    with torch.inference_mode(tensor.is_inference()):
        there = torch.empty(0, dtype=tensor.dtype, device="cpu")
        there.set_(part.untyped_storage(), offset, tensor.size(), strides)
        if keep_values:
            there.copy_(tensor.detach())
        # The object stays: optimizers, hooks and tied modules refer to it.
        tensor.data = there
    host.remember_home()


def _bring_back(host: HostTensor, part: Tensor, start: int) -> None:
    """Copy a tensor that was given other memory into its part of a buffer, and let it lie there."""
    moved(host.tensor, part)
    host.n_given += 1
    with torch.no_grad():
        _point(host, part, start, keep_values=True)


def _check_form(host: HostTensor, extent: Extent) -> None:
    # Of two tensors over the same bytes, one that left would leave the other with old values.
    if host.form != host.home_form or len(extent.tensors) > 1:
        raise PagingError(
            f"{host.name!r} was given other memory while it is paged, through .data or a method "
            f"such as half() or to(), and is now {describe_tensor(host.tensor)}: that can't "
            "be paged in its place. Call unpage(), change the model, and page it again."
        )
