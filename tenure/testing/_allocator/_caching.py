"""The accounting of CUDA's caching allocator: what is reserved is more than what is allocated.

Only a new segment is checked against the memory of the device and against the fraction of the
process, and both bound what is *reserved*. A free block serves its own pool and stream only. All
figures are those of `torch.cuda.memory_stats`, counted where CUDA counts them. How requests are
rounded, and segments cut, is what predictions know as well: ``tenure/_cuda_blocks.py``.

Source: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13, with its default settings.
"""

from collections.abc import Callable
from typing import Any

from tenure._cuda_blocks import CudaBlock, SegmentTable, rounded, segment_bytes
from tenure._text import format_bytes_as_torch as format_size

from .._torch_backend import DEVICE_TYPE
from ._memory import MemoryPool


class CachingPool(MemoryPool):
    """The caching allocator of one device.

    Args:
        budget_bytes: the memory that the device has; None for no bound.
        wait_host: called with a virtual time to stop the host until then.
        finished_s: when all work of the device will be done; giving back a segment waits for it.
        index: of the device.
    """

    names = (
        *MemoryPool.names,
        "segment",
        "reserved_bytes",
        "inactive_split",
        "inactive_split_bytes",
    )
    groups = ("all", "small_pool", "large_pool")
    has_cache = True

    def __init__(
        self,
        budget_bytes: int | None,
        wait_host: Callable[[float], None],
        finished_s: Callable[[], float],
        index: int = 0,
    ) -> None:
        super().__init__(budget_bytes, wait_host, index)
        self._finished_s = finished_s
        self._table = SegmentTable(index)

    @property
    def fraction(self) -> float:
        """The share of the device's memory that may be reserved."""
        return 1.0 if self._allowed_bytes is None else self._allowed_bytes / self.total_bytes

    @fraction.setter
    def fraction(self, share: float) -> None:
        self._allowed_bytes = int(share * self.total_bytes)

    def empty_cache(self, host_s: float) -> None:
        """Give back all segments of which nothing is in use."""
        with self._entered():
            self._reclaim()

    def snapshot(self) -> list[dict[str, Any]]:
        """Each segment and its blocks, as `torch.cuda.memory_snapshot` tells of them."""
        with self._entered():
            return [_told(blocks, self.index) for blocks in self._table.segments()]

    def _take(self, requested_bytes: int, stream_id: int) -> CudaBlock:
        """Take the best free block, or a part of it, or of a new segment."""
        n_bytes = rounded(requested_bytes)
        block = self._table.take(n_bytes, stream_id)
        if block is None:
            self._make_room(requested_bytes, segment_bytes(n_bytes))
            block = self._table.add(n_bytes, stream_id)
            self._count(block, segment=1, reserved_bytes=block.n_bytes)
        was_split = block.is_split
        rest = self._table.cut(block, n_bytes)
        if was_split:
            split = -int(rest is None)
            self._count(block, inactive_split=split, inactive_split_bytes=-block.n_bytes)
        elif rest is not None:
            self._count(rest, inactive_split=1, inactive_split_bytes=rest.n_bytes)
        block.is_active = True
        return block

    def _reclaim(self) -> bool:
        self._n_syncs += 1
        self._wait_for_recorded()
        unused = self._table.drop_unused()
        if unused:
            # As cudaFree does.
            self._wait_host(self._finished_s())
        for block in unused:
            self._count(block, segment=-1, reserved_bytes=-block.n_bytes)
        return True

    def _release(self, taken: CudaBlock) -> None:
        super()._release(taken)
        taken.is_active = False
        whole, merged = self._table.give_back(taken)
        blocks, n_bytes = -len(merged), -sum(merged)
        if whole.is_split:
            blocks, n_bytes = blocks + 1, n_bytes + whole.n_bytes
        self._count(whole, inactive_split=blocks, inactive_split_bytes=n_bytes)

    def _groups_of(self, taken: CudaBlock) -> tuple[str, ...]:
        return "all", "small_pool" if taken.segment.is_small else "large_pool"

    def _failure_text(self, requested_bytes: int) -> str:
        # Word for word, but for the device's name; what is tried is a segment, as on CUDA.
        allowed = self._allowed_bytes
        return (
            f"{DEVICE_TYPE}:{self.index} out of memory. Tried to allocate "
            f"{format_size(segment_bytes(rounded(requested_bytes)))}. GPU {self.index}"
            f" has a total capacity of {format_size(self.total_bytes)} of which"
            f" {format_size(self.free_bytes)} is free. Including non-PyTorch memory, this process"
            f" has {format_size(self.reserved_bytes)} memory in use. "
            + ("" if allowed is None else f"{format_size(allowed)} allowed; ")
            + f"Of the allocated memory {format_size(self.allocated_bytes)} is allocated by"
            f" PyTorch, and {format_size(self.reserved_bytes - self.allocated_bytes)} is reserved"
            " by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See"
            " documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
            "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )


def _told(blocks: list[CudaBlock], index: int) -> dict[str, Any]:
    segment = blocks[0].segment
    active = [block for block in blocks if block.is_active]
    return {
        "device": index,
        "address": segment.address,
        "total_size": segment.n_bytes,
        "allocated_size": sum(block.n_bytes for block in blocks if block.is_allocated),
        "active_size": sum(block.n_bytes for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "stream": segment.stream_id,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.n_bytes,
                "requested_size": block.requested_bytes,
                "state": _state(block),
                "frames": [],
            }
            for block in blocks
        ],
    }


def _state(block: CudaBlock) -> str:
    if block.is_allocated:
        return "active_allocated"
    return "active_pending_free" if block.is_active else "inactive"
