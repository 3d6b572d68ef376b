"""What the allocator of an accelerator has counted: no event tells it, and no counter is reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

Stats = Mapping[str, Any]
"""As ``memory_stats_as_nested_dict()`` gives it, or flat, as ``memory_stats()`` does."""


class Allocated(NamedTuple):
    """The four figures of the allocated bytes; all 0 while a backend is not initialised."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0


def counters_of(device: torch.device) -> Stats:
    """Read the counters of a device whose module has ``memory_stats``."""
    module: Any = torch.get_device_module(device)
    # torch makes the hundred flat names anew at each call, and sorts them
    read = getattr(module, "memory_stats_as_nested_dict", None) or module.memory_stats
    found: Stats = read(device)
    return found


def allocated_in(stats: Stats) -> Allocated:
    """Return the four figures that say what happened to the allocated bytes."""
    pools = stats.get("allocated_bytes")
    if pools is not None:
        return Allocated(**pools["all"])
    get = stats.get
    return Allocated(*(get(f"allocated_bytes.all.{figure}", 0) for figure in Allocated._fields))
