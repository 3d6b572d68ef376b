"""Requests rounded to blocks, segments cut into them, and the free ones of pools and streams.

The blocks of a segment tile it, and no two free ones are neighbours. Addresses are numbers: nothing
lies there.

Source: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13, without its expandable segments.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20

# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h
SMALLEST_BLOCK = 512
_LARGEST_SMALL_REQUEST = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_LEAST_OWN_SEGMENT = 10 * MIB
_SEGMENT_STEP = 2 * MIB

# Far from the addresses of a host's memory, and never given twice.
_FIRST_ADDRESS = 0x10_0000_0000


def rounded(requested_bytes: int) -> int:
    """The size of the block that a request needs."""
    return _up_to(requested_bytes, SMALLEST_BLOCK)


def is_small(block_bytes: int) -> bool:
    """Whether a block of this size comes from the small pool."""
    return block_bytes <= _LARGEST_SMALL_REQUEST


def segment_bytes(block_bytes: int) -> int:
    """How much is taken from the device where no free block is left for one of this size."""
    if is_small(block_bytes):
        return _SMALL_SEGMENT
    if block_bytes < _LEAST_OWN_SEGMENT:
        return _LARGE_SEGMENT
    return _up_to(block_bytes, _SEGMENT_STEP)


def _up_to(n_bytes: int, step: int) -> int:
    return -(-n_bytes // step) * step


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
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment; if not, it is the whole of it."""
        return self.before is not None or self.after is not None

    def should_split(self, n_bytes: int) -> bool:
        """Whether what `n_bytes` leave over of this block becomes a free block of its own."""
        left_bytes = self.n_bytes - n_bytes
        if self.segment.is_small:
            return left_bytes >= SMALLEST_BLOCK
        return left_bytes > _LARGEST_SMALL_REQUEST

    def cut(self, n_bytes: int) -> "Block":
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


def _chain(head: Block | None) -> list[Block]:
    blocks = []
    while head is not None:
        blocks.append(head)
        head = head.after
    return blocks
