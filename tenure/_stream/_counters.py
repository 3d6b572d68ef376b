"""What the allocator of an accelerator has counted: no event tells it, and no counter is reset."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Allocated(NamedTuple):
    """The four figures of the allocated bytes; all 0 while a backend is not initialised."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0


def allocated_on(device: torch.device) -> Allocated:
    """Read the four figures of a device whose module has ``memory_stats``."""
    module: Any = torch.get_device_module(device)
    # torch makes the hundred flat names anew at each call, and sorts them
    if nested := getattr(module, "memory_stats_as_nested_dict", None):
        pools = nested(device).get("allocated_bytes", {})
        return Allocated(**pools.get("all", {}))
    stats = module.memory_stats(device)
    return Allocated(*(stats.get(f"allocated_bytes.all.{each}", 0) for each in Allocated._fields))
