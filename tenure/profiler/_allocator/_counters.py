"""What a device's allocator says of its own bytes, whichever backend it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class AllocatorBytes(NamedTuple):
    """The bytes of one device, as its allocator counts them.

    Attributes:
        allocated: bytes of the blocks in use.
        requested: bytes that were asked for; less than allocated by what the blocks are rounded up.
        reserved: bytes that the allocator took from the device, in use or cached.
        device_used: bytes in use on the device by all processes, the driver's among them; None
            where the backend does not tell.
    """

    allocated: int
    requested: int
    reserved: int
    device_used: int | None


def allocator_bytes(device: torch.device) -> AllocatorBytes | None:
    """The counters of a device; None where torch keeps none, as on the CPU.

    Nothing is synchronized, emptied or reset.
    """
    if device.type in {"cpu", "meta"}:
        return None
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # a backend without a module
        return None
    stats = _stats(module, device)
    if not stats:
        return _allocated_only(module, device)
    allocated = stats["allocated_bytes.all.current"]
    return AllocatorBytes(
        allocated,
        stats.get("requested_bytes.all.current") or allocated,  # some backends leave it at 0
        stats.get("reserved_bytes.all.current", allocated),
        _device_used(module, device),
    )


def _stats(module: Any, device: torch.device) -> dict[str, int]:
    try:
        stats = dict(module.memory_stats(device))
    except (AttributeError, RuntimeError, NotImplementedError):
        return {}
    return stats if "allocated_bytes.all.current" in stats else {}


def _allocated_only(module: Any, device: torch.device) -> AllocatorBytes | None:
    """Of a backend with less to tell, such as MPS."""
    try:
        if hasattr(module, "memory_allocated"):
            allocated = int(module.memory_allocated(device))
        else:
            allocated = int(module.current_allocated_memory())
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return AllocatorBytes(allocated, allocated, _driver_bytes(module) or allocated, None)


def _driver_bytes(module: Any) -> int | None:
    """What MPS has taken from the driver, its cache and its libraries' memory among it."""
    try:
        return int(module.driver_allocated_memory())
    except (AttributeError, RuntimeError):
        return None


def _device_used(module: Any, device: torch.device) -> int | None:
    try:
        free, total = module.mem_get_info(device)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return int(total) - int(free)
