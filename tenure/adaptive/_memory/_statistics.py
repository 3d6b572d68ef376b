"""What the allocator of a device holds, whatever its module calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tenure._torch.device_allocator import has_expandable_segments


class Held(NamedTuple):
    """The bytes that an allocator holds of a device.

    Attributes:
        allocated_bytes: what tensors use.
        active_bytes: that, and what the work of a stream still uses.
        reserved_bytes: all that it holds.
        split_bytes: the free parts of segments that are in use: they can't be given back.
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    split_bytes: int

    @property
    def unused_bytes(self) -> int:
        """What no tensor uses, wherever it lies."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def spare_bytes(self) -> int:
        """What can be given back to the device, and so serve anything."""
        return self.reserved_bytes - self.active_bytes - self.split_bytes


def held_by(module: Any, device: torch.device) -> Held:
    """Read an allocator; raises whatever the module does where it tells nothing."""
    stats = module.memory_stats(device) if hasattr(module, "memory_stats") else {}
    if "reserved_bytes.all.current" in stats:
        return _of_stats(stats)
    if hasattr(module, "driver_allocated_memory"):  # MPS, of which there is one
        allocated_bytes = int(module.current_allocated_memory())
        reserved_bytes = max(allocated_bytes, int(module.driver_allocated_memory()))
    else:
        allocated_bytes = int(module.memory_allocated(device))
        reserved_bytes = int(module.memory_reserved(device))
    return Held(allocated_bytes, allocated_bytes, reserved_bytes, 0)


def _of_stats(stats: dict[str, Any]) -> Held:
    allocated_bytes = int(stats["allocated_bytes.all.current"])
    split_bytes = int(stats.get("inactive_split_bytes.all.current", 0))
    return Held(
        allocated_bytes,
        # not every backend counts it
        max(allocated_bytes, int(stats.get("active_bytes.all.current", 0))),
        int(stats["reserved_bytes.all.current"]),
        0 if has_expandable_segments() else split_bytes,
    )
