"""The accounting of CUDA's caching allocator: what is reserved is more than what is allocated.

Only a new segment is checked against the memory of the device and against the fraction of the
process, and both bound what is *reserved*. A free block serves its own pool and stream only. All
figures are those of `torch.cuda.memory_stats`, counted where CUDA counts them. How requests are
rounded, and segments cut, is what predictions know as well: ``tenure/_cuda_blocks.py``.

Source: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13, with its default settings.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from tenure._cuda_blocks import Block, SegmentTable, rounded, segment_bytes
from tenure._text import format_bytes_as_torch as format_size

from .._torch_backend import DEVICE_TYPE
from ._memory import FIGURES, Counter, MemoryPool
from ._runtime import last_error

_Group = Literal["all", "small_pool", "large_pool"]
_GROUPS: tuple[_Group, ...] = ("all", "small_pool", "large_pool")
_NAMES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


class CachingPool(MemoryPool):
    """The caching allocator of one device.

    Args:
        budget_bytes: the memory that the device has; None for no bound.
        wait_host: called with a virtual time to stop the host until then.
        finished_s: when all work of the device will be done; giving back a segment waits for it.
        index: of the device.
    """

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
        self._groups = {group: {name: Counter() for name in _NAMES} for group in _GROUPS}
        self.counters = self._groups["all"]
        self._is_busy = False
        self._dead: list[tuple[Block, float | None]] = []
        self._allowed_bytes: int | None = None
        self._n_syncs = self._n_device_allocs = self._n_device_frees = 0

    @property
    def reserved_bytes(self) -> int:
        """All segments together."""
        return self.counters["reserved_bytes"].current

    @property
    def fraction(self) -> float:
        """The share of the device's memory that may be reserved."""
        return 1.0 if self._allowed_bytes is None else self._allowed_bytes / self.total_bytes

    @fraction.setter
    def fraction(self, share: float) -> None:
        self._allowed_bytes = int(share * self.total_bytes)

    def allocate(self, requested_bytes: int, host_s: float, stream_id: int = 0) -> Block | None:
        """Take the best free block, or a part of it, or of a new segment."""
        if requested_bytes == 0:
            return None
        with self._entered():
            self._count_down(requested_bytes)
            self.release_finished(host_s)
            n_bytes = rounded(requested_bytes)
            block = self._table.take(n_bytes, stream_id)
            if block is None:
                block = self._in_new_segment(requested_bytes, n_bytes, stream_id)
            self._activate(block, requested_bytes, n_bytes)
            return block

    def free(
        self, taken: Block | None, busy_until_s: float | None = None, host_s: float = 0.0
    ) -> None:
        """Make a block free again; what waits is looked at by the next allocation, not here."""
        if taken is None:
            return
        with self._lock:
            self._dead.append((taken, busy_until_s))
            # A tensor may die in the middle of an allocation: its block waits for the end of that.
            if not self._is_busy:
                self._take_back()

    def empty_cache(self, host_s: float) -> None:
        """Give back all segments of which nothing is in use."""
        with self._entered():
            self._release_cached()

    def statistics(self, host_s: float) -> dict[str, int]:
        """What `torch.cuda.memory_stats` tells."""
        stats = {
            f"{name}.{group}.{figure}": getattr(self._groups[group][name], figure)
            for name in _NAMES
            for group in _GROUPS
            for figure in FIGURES
        }
        return stats | {
            "num_alloc_retries": self.retry_count,
            "num_ooms": self.n_ooms,
            "num_sync_all_streams": self._n_syncs,
            "num_device_alloc": self._n_device_allocs,
            "num_device_free": self._n_device_frees,
            "max_split_size": -1,
        }

    def snapshot(self) -> list[dict[str, Any]]:
        """Each segment and its blocks, as `torch.cuda.memory_snapshot` tells of them."""
        with self._entered():
            return [_told(blocks, self.index) for blocks in self._table.segments()]

    def reset_peaks(self) -> None:
        """Start all peaks from the current values, those of both pools too."""
        for counters in self._groups.values():
            for counter in counters.values():
                counter.peak = counter.current

    def reset_totals(self) -> None:
        """Start the running totals from zero."""
        self.n_ooms = self.retry_count = 0
        self._n_syncs = self._n_device_allocs = self._n_device_frees = 0
        for counters in self._groups.values():
            for counter in counters.values():
                counter.allocated = counter.freed = 0

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False
                self._take_back()

    def _take_back(self) -> None:
        while self._dead:
            block, busy_until_s = self._dead.pop(0)
            block.is_allocated = False
            self._shrink(block, allocation=1, allocated_bytes=block.n_bytes)
            self._let_go(block, busy_until_s)

    def _in_new_segment(self, requested_bytes: int, n_bytes: int, stream_id: int) -> Block:
        # Here and not for blocks that are free already: CUDA is asked for new segments alone.
        last_error.check()
        wanted_bytes = segment_bytes(n_bytes)
        if not self._fits(wanted_bytes):
            self._release_cached()
            self.retry_count += 1
            if not self._fits(wanted_bytes):
                self.refuse(requested_bytes)
        block = self._table.add(n_bytes, stream_id)
        self._n_device_allocs += 1
        self._grow(block, segment=1, reserved_bytes=wanted_bytes)
        return block

    def _fits(self, n_bytes: int) -> bool:
        held_bytes = self.reserved_bytes + n_bytes
        is_allowed = self._allowed_bytes is None or held_bytes <= self._allowed_bytes
        return is_allowed and (self.budget_bytes is None or held_bytes <= self.budget_bytes)

    def _release_cached(self) -> None:
        self._n_syncs += 1
        self._wait_for_recorded()
        unused = self._table.drop_unused()
        if unused:
            # As cudaFree does.
            self._wait_host(self._finished_s())
        for block in unused:
            self._n_device_frees += 1
            self._shrink(block, segment=1, reserved_bytes=block.n_bytes)

    def _activate(self, block: Block, requested_bytes: int, n_bytes: int) -> None:
        was_split = block.is_split
        if rest := self._table.cut(block, n_bytes):
            if was_split:
                self._shrink(block, inactive_split_bytes=n_bytes)
            else:
                self._grow(rest, inactive_split=1, inactive_split_bytes=rest.n_bytes)
        elif was_split:
            self._shrink(block, inactive_split=1, inactive_split_bytes=block.n_bytes)
        block.is_allocated = block.is_active = True
        block.requested_bytes = requested_bytes
        self._grow(
            block,
            allocation=1,
            active=1,
            allocated_bytes=block.n_bytes,
            active_bytes=block.n_bytes,
            requested_bytes=requested_bytes,
        )

    def _release(self, taken: Block) -> None:
        self._shrink(
            taken, active=1, active_bytes=taken.n_bytes, requested_bytes=taken.requested_bytes
        )
        taken.is_active = False
        whole, merged = self._table.give_back(taken)
        blocks, n_bytes = -len(merged), -sum(merged)
        if whole.is_split:
            blocks, n_bytes = blocks + 1, n_bytes + whole.n_bytes
        self._change(whole, "inactive_split", blocks)
        self._change(whole, "inactive_split_bytes", n_bytes)

    def _change(self, block: Block, name: str, amount: int) -> None:
        if amount > 0:
            self._grow(block, **{name: amount})
        elif amount < 0:
            self._shrink(block, **{name: -amount})

    def _grow(self, block: Block, **amounts: int) -> None:
        for group in _groups_of(block):
            for name, amount in amounts.items():
                self._groups[group][name].grow(amount)

    def _shrink(self, block: Block, **amounts: int) -> None:
        for group in _groups_of(block):
            for name, amount in amounts.items():
                self._groups[group][name].shrink(amount)

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


def _groups_of(block: Block) -> tuple[_Group, _Group]:
    return "all", "small_pool" if block.segment.is_small else "large_pool"


def _told(blocks: list[Block], index: int) -> dict[str, Any]:
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


def _state(block: Block) -> str:
    if block.is_allocated:
        return "active_allocated"
    return "active_pending_free" if block.is_active else "inactive"
