"""What a record takes of an accelerator, whose allocator rounds, cuts segments and keeps them.

The allocator is taken to be empty before the work: what was there before it is allocated first, in
the order of the record. One stream has all blocks: gradients that CUDA computes on the stream of
their forward pass are on it, and what other streams of the user's take would be cached apart.
"""

from __future__ import annotations

from typing import NamedTuple

from tenure._cuda_blocks import CachedBlocks, CudaBlock

from ._blocks import LiveBlock, MemoryRecord


class ReplayedPeak(NamedTuple):
    """What an allocator like CUDA's makes of a record.

    Attributes:
        allocated_peak: the most bytes of blocks in use, rounded as they are.
        reserved_peak: the most bytes of segments, in use or cached.
        fits: whether the budget was never exceeded.
    """

    allocated_peak: int
    reserved_peak: int
    fits: bool


def replay(record: MemoryRecord, budget: int | None = None) -> ReplayedPeak:
    """Take and give back all blocks of a record in order.

    Args:
        record: of the work.
        budget: the bytes that may be reserved; what is cached is given back where they do not do,
            as CUDA does. Where that is too little, the figures are those without a refusal.
    """
    memory = CachedBlocks(budget)
    places: dict[LiveBlock, CudaBlock | None] = {
        block: memory.allocate(n_bytes) for block, n_bytes in record.existing.items()
    }
    for block, n_bytes, _ in record.events:
        # a storage that grows has both until its bytes are copied
        before = places.pop(block, None)
        if n_bytes:
            places[block] = memory.allocate(n_bytes)
        memory.free(before)
    return ReplayedPeak(memory.allocated_peak_bytes, memory.reserved_peak_bytes, memory.fits)
