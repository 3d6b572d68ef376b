"""CUDA's caching allocator in numbers: requests become blocks, and segments are cut into blocks.

A request is rounded up to a block, a block comes from a segment. The blocks of a segment tile it,
and no two free ones are neighbours. Addresses are numbers: nothing lies there.

Source: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13 with its default settings, without its
expandable segments. The CPU's allocator takes what it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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
    """Whether a device's allocator takes more than it is asked for."""
    return device.type != "cpu"


def whole_block_bytes(n_bytes: int, device: torch.device) -> int:
    """The least size from ``n_bytes`` on that an empty allocator does not round."""
    if not is_rounding(device):
        return n_bytes
    return up_to(n_bytes, BLOCK_BYTES if n_bytes < OWN_SEGMENT_BYTES else SEGMENT_STEP_BYTES)


def up_to(n_bytes: int, step_bytes: int) -> int:
    """The next multiple of a step."""
    return -(-n_bytes // step_bytes) * step_bytes


def rounded(requested_bytes: int) -> int:
    """The size of the block that a request needs."""
    return up_to(requested_bytes, BLOCK_BYTES)


def is_small(block_bytes: int) -> bool:
    """Whether a block of this size comes from the small pool."""
    return block_bytes <= _LARGEST_SMALL_BYTES


def is_cut(rest_bytes: int, *, is_small: bool) -> bool:
    """Whether what a request leaves over of a block of a pool becomes a free block of its own."""
    return rest_bytes >= BLOCK_BYTES if is_small else rest_bytes > _LARGEST_SMALL_BYTES


def segment_bytes(block_bytes: int) -> int:
    """How much is taken from the device where no free block is left for one of this size."""
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
class Block:
    """A part of a segment: allocated, waiting for recorded streams, or free."""

    segment: Segment
    address: int
    n_bytes: int
    requested_bytes: int = 0
    is_allocated: bool = False
    is_active: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment; if not, it is the whole of it."""
        return self.before is not None or self.after is not None

    def should_split(self, n_bytes: int) -> bool:
        """Whether what `n_bytes` leave over of this block becomes a free block of its own."""
        return is_cut(self.n_bytes - n_bytes, is_small=self.segment.is_small)

    def cut(self, n_bytes: int) -> Block:
        """Keep the first `n_bytes` and return the rest, as a block behind this one."""
        rest = Block(self.segment, self.address + n_bytes, self.n_bytes - n_bytes)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.n_bytes = rest, n_bytes
        return rest

    def absorb_next(self) -> None:
        """Take over the block behind this one."""
        gone = self.after
        assert gone is not None
        self.n_bytes += gone.n_bytes
        self.after = gone.after
        if self.after is not None:
            self.after.before = self


class SegmentTable:
    """All segments of a device, of this index, by address, and their free blocks by size."""

    def __init__(self, index: int) -> None:
        self._heads: dict[Segment, Block] = {}
        self._free: dict[tuple[bool, int], list[tuple[int, int, Block]]] = {}
        self._next_address = _FIRST_ADDRESS * (1 + index)

    def add(self, n_bytes: int, stream_id: int, *, is_small: bool) -> Block:
        """A new segment: one block, not yet among the free ones."""
        segment = Segment(self._next_address, n_bytes, stream_id, is_small)
        self._next_address += n_bytes
        self._heads[segment] = Block(segment, segment.address, n_bytes)
        return self._heads[segment]

    def take(self, n_bytes: int, stream_id: int, *, is_small: bool) -> Block | None:
        """The smallest free block of the pool and stream with room, no longer a free one."""
        free = self._free.get((is_small, stream_id), [])
        index = bisect_left(free, (n_bytes,))
        return free.pop(index)[2] if index < len(free) else None

    def cut(self, block: Block, n_bytes: int) -> Block:
        """Make the rest of a block that was taken a free one."""
        rest = block.cut(n_bytes)
        self._put(rest)
        return rest

    def give_back(self, block: Block) -> tuple[Block, list[int]]:
        """Make a block free, and one with its free neighbours; returns it and their sizes."""
        merged = []
        after, before = block.after, block.before
        if after is not None and not after.is_active:
            merged.append(after.n_bytes)
            self._drop(after)
            block.absorb_next()
        if before is not None and not before.is_active:
            merged.append(before.n_bytes)
            self._drop(before)
            before.absorb_next()
            block = before
        self._put(block)
        return block, merged

    def drop_unused(self) -> list[Block]:
        """Forget the segments of which nothing is in use; the one block of each is returned."""
        heads = list(self._heads.values())
        unused = [head for head in heads if not (head.is_active or head.is_split)]
        for head in unused:
            self._drop(head)
            del self._heads[head.segment]
        return unused

    def segments(self) -> list[tuple[Segment, list[Block]]]:
        """Each segment with its blocks, in the order of their addresses."""
        return [(segment, _chain(head)) for segment, head in self._heads.items()]

    def _put(self, block: Block) -> None:
        place = (block.segment.is_small, block.segment.stream_id)
        insort(self._free.setdefault(place, []), (block.n_bytes, block.address, block))

    def _drop(self, block: Block) -> None:
        free = self._free[block.segment.is_small, block.segment.stream_id]
        entry: tuple[Any, ...] = (block.n_bytes, block.address)
        del free[bisect_left(free, entry)]


class CachedMemory:
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
        self._table = SegmentTable(0)
        self.allocated_bytes = self.reserved_bytes = 0
        self.allocated_peak_bytes = self.reserved_peak_bytes = 0
        self.fits = True

    def allocate(self, requested_bytes: int) -> Block | None:
        """Take the best free block, or a part of it, or of a new segment; None for no bytes."""
        if not requested_bytes:
            return None
        n_bytes = rounded(requested_bytes)
        block = self._table.take(n_bytes, 0, is_small=is_small(n_bytes))
        if block is None:
            block = self._in_new_segment(n_bytes)
        if block.should_split(n_bytes):
            self._table.cut(block, n_bytes)
        block.is_active = True
        self.allocated_bytes += block.n_bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Keep a block for the next that asks."""
        if block is not None:
            self.allocated_bytes -= block.n_bytes
            block.is_active = False
            self._table.give_back(block)

    def _in_new_segment(self, n_bytes: int) -> Block:
        wanted_bytes = segment_bytes(n_bytes)
        if not self._has_room(wanted_bytes):
            self.reserved_bytes -= sum(block.n_bytes for block in self._table.drop_unused())
            self.fits &= self._has_room(wanted_bytes)
        self.reserved_bytes += wanted_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return self._table.add(wanted_bytes, 0, is_small=is_small(n_bytes))

    def _has_room(self, n_bytes: int) -> bool:
        return self._budget_bytes is None or self.reserved_bytes + n_bytes <= self._budget_bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of a device.

    Attributes:
        allocated_bytes: of the blocks, with what is too little to be a block of its own.
        reserved_bytes: of the segments that they lie in.
    """

    allocated_bytes: int
    reserved_bytes: int


def taken_by(sizes: Iterable[int], device: torch.device) -> Taken:
    """What blocks of these sizes take, allocated one after the other."""
    if not is_rounding(device):
        n_bytes = sum(sizes)
        return Taken(n_bytes, n_bytes)
    memory = CachedMemory()
    for size in sizes:
        memory.allocate(size)
    return Taken(memory.allocated_bytes, memory.reserved_bytes)


def _chain(head: Block | None) -> list[Block]:
    blocks = []
    while head is not None:
        blocks.append(head)
        head = head.after
    return blocks
