"""CUDA's caching allocator in numbers: requests become blocks, and segments are cut into blocks.

A request is rounded up to a block, a block comes from a segment. The blocks of a segment tile it,
and no two free ones are neighbours. Addresses are numbers: nothing lies there.

Source: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13 with its default settings, without its
expandable segments. The CPU's allocator takes what it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

MIB = 2**20

# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h
BLOCK_BYTES = 512
_LARGEST_SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a block has a segment of its own, of whole ``SEGMENT_STEP_BYTES``."""
SEGMENT_STEP_BYTES = 2 * MIB
# Far from the addresses of a host's memory, and never given twice.
_FIRST_ADDRESS = 0x10_0000_0000


def is_rounding(device: torch.device) -> bool:
    """Return whether a device's allocator takes more than it is asked for."""
    return device.type != "cpu"


def whole_block_bytes(n_bytes: int, device: torch.device) -> int:
    """Return the least size from ``n_bytes`` on that an empty allocator does not round."""
    if not is_rounding(device):
        return n_bytes
    return up_to(n_bytes, BLOCK_BYTES if n_bytes < OWN_SEGMENT_BYTES else SEGMENT_STEP_BYTES)


def up_to(n_bytes: int, step_bytes: int) -> int:
    """Return the next multiple of a step."""
    return -(-n_bytes // step_bytes) * step_bytes


def rounded(requested_bytes: int) -> int:
    """Return the size of the block that a request needs."""
    return up_to(requested_bytes, BLOCK_BYTES)


def is_small(block_bytes: int) -> bool:
    """Return whether a block of this size comes from the small pool."""
    return block_bytes <= _LARGEST_SMALL_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Return how much is taken from the device where no free block is left for one of this size."""
    if is_small(block_bytes):
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return up_to(block_bytes, SEGMENT_STEP_BYTES)


@dataclass(slots=True, eq=False)
class Segment:
    """One range that the device gave; all of it belongs to one pool and one stream."""

    address: int
    n_bytes: int
    stream_id: int
    is_small: bool


@dataclass(slots=True, eq=False)
class CudaBlock:
    """A part of a segment: allocated, waiting for recorded streams, or free."""

    segment: Segment
    address: int
    n_bytes: int
    requested_bytes: int = 0
    is_allocated: bool = False
    is_active: bool = False
    before: CudaBlock | None = field(default=None, repr=False)
    after: CudaBlock | None = field(default=None, repr=False)

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment; if not, it is the whole of it."""
        return self.before is not None or self.after is not None


class SegmentTable:
    """All segments of a device, of this index, by address, and their free blocks by size."""

    def __init__(self, index: int = 0) -> None:
        # the first block of each
        self._heads: list[CudaBlock] = []
        # of each pool and stream
        self._free: defaultdict[tuple[bool, int], list[tuple[int, int, CudaBlock]]] = defaultdict(
            list
        )
        self._next_address = _FIRST_ADDRESS * (1 + index)

    def add(self, block_bytes: int, stream_id: int = 0) -> CudaBlock:
        """Add a segment for a block of this size: one block, not yet among the free ones."""
        n_bytes, address = segment_bytes(block_bytes), self._next_address
        segment = Segment(address, n_bytes, stream_id, is_small(block_bytes))
        self._next_address += n_bytes
        self._heads.append(CudaBlock(segment, address, n_bytes))
        return self._heads[-1]

    def take(self, n_bytes: int, stream_id: int = 0) -> CudaBlock | None:
        """Return the smallest free block of the pool and stream with room, no longer a free one."""
        free = self._free[is_small(n_bytes), stream_id]
        index = bisect_left(free, (n_bytes,))
        return free.pop(index)[2] if index < len(free) else None

    def cut(self, block: CudaBlock, n_bytes: int) -> CudaBlock | None:
        """Keep the first bytes of a block that was taken; return the rest, a free block.

        None if the rest is too little for a block of its own.
        """
        segment, rest_bytes = block.segment, block.n_bytes - n_bytes
        if rest_bytes < BLOCK_BYTES or not (segment.is_small or rest_bytes > _LARGEST_SMALL_BYTES):
            return None
        rest = CudaBlock(segment, block.address + n_bytes, rest_bytes)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.n_bytes = rest, n_bytes
        self._put(rest)
        return rest

    def give_back(self, block: CudaBlock) -> tuple[CudaBlock, list[int]]:
        """Make a block free, and one with its free neighbours; return it and their sizes."""
        merged, before, after = [], block.before, block.after
        if after is not None and not after.is_active:
            merged.append(after.n_bytes)
            self._drop(after)
            _join(block, after)
        if before is not None and not before.is_active:
            merged.append(before.n_bytes)
            self._drop(before)
            _join(before, block)
            block = before
        self._put(block)
        return block, merged

    def drop_unused(self) -> list[CudaBlock]:
        """Forget the segments of which nothing is in use; return the one block of each."""
        unused = [head for head in self._heads if not (head.is_active or head.is_split)]
        for head in unused:
            self._drop(head)
        self._heads = [head for head in self._heads if head.is_active or head.is_split]
        return unused

    def segments(self) -> list[list[CudaBlock]]:
        """Return the blocks of each segment, in the order of their addresses."""
        found = [[head] for head in self._heads]
        for blocks in found:
            while (after := blocks[-1].after) is not None:
                blocks.append(after)
        return found

    def _put(self, block: CudaBlock) -> None:
        pool = self._free[block.segment.is_small, block.segment.stream_id]
        insort(pool, (block.n_bytes, block.address, block))

    def _drop(self, block: CudaBlock) -> None:
        free = self._free[block.segment.is_small, block.segment.stream_id]
        entry: tuple[Any, ...] = (block.n_bytes, block.address)
        del free[bisect_left(free, entry)]


def _join(first: CudaBlock, second: CudaBlock) -> None:
    """Give the bytes of a block to the one before it."""
    first.n_bytes += second.n_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first


class CachedBlocks:
    """What blocks take of a device that serves nobody else, on one stream.

    Args:
        budget_bytes: the most that may be reserved; None for no bound. What is cached is given back
            before a block is refused, as on CUDA.

    Attributes:
        allocated_bytes: of the blocks in use.
        reserved_bytes: of all segments.
        allocated_peak_bytes: the most that was in use.
        reserved_peak_bytes: the most that was reserved.
        fits: whether nothing was refused. What was is counted as if it had not been.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._table = SegmentTable()
        self.allocated_bytes = self.reserved_bytes = 0
        self.allocated_peak_bytes = self.reserved_peak_bytes = 0
        self.fits = True

    def allocate(self, requested_bytes: int) -> CudaBlock | None:
        """Take the best free block, or a part of it, or of a new segment; None for no bytes."""
        if not requested_bytes:
            return None
        n_bytes = rounded(requested_bytes)
        block = self._table.take(n_bytes) or self._in_new_segment(n_bytes)
        self._table.cut(block, n_bytes)
        block.is_active = True
        self.allocated_bytes += block.n_bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: CudaBlock | None) -> None:
        """Keep a block for the next that asks."""
        if block is not None:
            self.allocated_bytes -= block.n_bytes
            block.is_active = False
            self._table.give_back(block)

    def _in_new_segment(self, n_bytes: int) -> CudaBlock:
        wanted_bytes = segment_bytes(n_bytes)
        if not self._has_room(wanted_bytes):
            self.reserved_bytes -= sum(block.n_bytes for block in self._table.drop_unused())
            self.fits &= self._has_room(wanted_bytes)
        self.reserved_bytes += wanted_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return self._table.add(n_bytes)

    def _has_room(self, n_bytes: int) -> bool:
        return self._budget_bytes is None or self.reserved_bytes + n_bytes <= self._budget_bytes


def taken_by(sizes: Iterable[int], device: torch.device) -> CachedBlocks:
    """Return what blocks of these sizes take, allocated one after the other."""
    memory = CachedBlocks()
    if not is_rounding(device):
        memory.allocated_bytes = memory.reserved_bytes = sum(sizes)
        return memory
    for size in sizes:
        memory.allocate(size)
    return memory
