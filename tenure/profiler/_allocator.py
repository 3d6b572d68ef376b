"""What an allocator holds, in all and block by block: its cache, and what libraries took.

A library's working memory is known by its size alone: as many blocks of it as no tensor has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tenure._devices import accelerator_of, counters_of, told_by
from tenure._torch.device_allocator import FREE, free_block_bytes, segments_of, workspace_bytes

_IN_USE = "active_allocated"


class AllocatorBytes(NamedTuple):
    """The bytes of one device, as its allocator counts them.

    Attributes:
        allocated: bytes of the blocks in use.
        requested: bytes that were asked for; less than allocated by what the blocks are rounded up.
        reserved: bytes that the allocator took from the device, in use or cached.
        device_used: bytes in use on the device by all processes, the driver's among them; None
            where the backend does not tell.
        largest_free: the largest block that it has free; more than that needs a new segment. None
            where it does not tell of its blocks.
        inactive_split: free bytes that lie beside blocks in use: ``empty_cache()`` can't give them
            back; None as above.
        n_blocks_in_use: by the bytes that were asked for, how many blocks are in use.
    """

    allocated: int
    requested: int
    reserved: int
    device_used: int | None
    largest_free: int | None
    inactive_split: int | None
    n_blocks_in_use: Counter[int]


def allocator_bytes(device: torch.device) -> AllocatorBytes | None:
    """Return the counters of a device; None where torch keeps none, as on the CPU."""
    found = accelerator_of(device)
    if found is None:
        return None
    counters = counters_of(*found)
    if counters.allocated is None:
        return None
    segments = segments_of(*found)
    all_blocks = [segment["blocks"] for segment in segments if segment.get("blocks")]
    free = [[b["size"] for b in blocks if b["state"] == FREE] for blocks in all_blocks]
    pairs = zip(free, all_blocks, strict=True)
    in_use = (b for blocks in all_blocks for b in blocks if b["state"] == _IN_USE)
    return AllocatorBytes(
        counters.allocated,
        # some backends leave what was requested at 0
        counters.requested or counters.allocated,
        max(counters.allocated, counters.reserved or 0),
        _device_used(*found),
        max(free_block_bytes(segments), default=0) if all_blocks else None,
        sum(sum(f) for f, blocks in pairs if len(f) < len(blocks)) if all_blocks else None,
        Counter(b.get("requested_size", b["size"]) for b in in_use),
    )


def _device_used(module: Any, device: torch.device) -> int | None:
    # the driver is asked for no device that is not in use: that would bring a context to life
    if told_by(module, "is_initialized") is False:
        return None
    told = told_by(module, "mem_get_info", device)
    return None if told is None else int(told[1]) - int(told[0])


def bytes_of_workspaces(
    device: torch.device, counted: AllocatorBytes, storage_bytes: Iterable[int]
) -> int | None:
    """Return the bytes of workspaces, as of cuBLAS, in the allocator; None if it has none.

    Args:
        device: the device, with its index.
        counted: what its allocator counts.
        storage_bytes: the bytes of each storage that a tensor has.
    """
    # Sizes, each once: handles of cuBLAS and cuBLASLt may ask for blocks of the same.
    sizes = set(workspace_bytes(device).values())
    if not sizes or counted.largest_free is None:
        return None
    n_of_tensors = Counter(storage_bytes)
    return sum(n * max(0, counted.n_blocks_in_use[n] - n_of_tensors[n]) for n in sizes)
