"""The blocks of memory that a piece of work takes, in order: what is alive at its worst moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from tenure._cuda_blocks import CachedBlocks

Category = Literal[
    "parameters", "buffers", "gradients", "optimizer state", "inputs", "activations", "temporaries"
]
"""The use of a block. Activations were made by the forward pass and were still alive at its end;
what the work made and freed in between is temporary."""
Phase = Literal["forward", "backward", "optimizer step"]

CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(slots=True, eq=False)
class LiveBlock:
    """One storage, while it lives; or the memory that a kernel takes while it runs.

    Attributes:
        n_bytes: its size.
        phase: where it was made; None for what was there before the work.
        category: what it is for; None until that is known.
        is_of_library: whether a library keeps it for good.
        is_offloaded: whether it is in the memory of the host, and the work's on an accelerator.
    """

    n_bytes: int
    phase: Phase | None = None
    category: Category | None = None
    outlived_forward: bool = False
    is_of_library: bool = False
    is_offloaded: bool = False


class BlockEvent(NamedTuple):
    """A change of the bytes of a block.

    Attributes:
        block: the block.
        n_bytes: what it takes from now on; 0 when it dies.
        operation: the number of the operation that ran, or had last run.
    """

    block: LiveBlock
    n_bytes: int
    operation: int


@dataclass(slots=True)
class MemoryRecord:
    """All blocks of a piece of work.

    Attributes:
        existing: the bytes of those that were there before it; some grow, or die, in it.
        events: what changed, in order.
    """

    existing: dict[LiveBlock, int] = field(default_factory=dict)
    events: list[BlockEvent] = field(default_factory=list)

    @property
    def baseline_bytes(self) -> int:
        """The bytes that were there before."""
        return sum(self.existing.values())

    def peak(self) -> tuple[int, int]:
        """Return the most bytes that are alive, and the first event after which they are, or -1."""
        now = dict(self.existing)
        live_bytes = most_bytes = self.baseline_bytes
        at = -1
        for i, (block, n_bytes, _) in enumerate(self.events):
            live_bytes += n_bytes - now.get(block, 0)
            now[block] = n_bytes
            if live_bytes > most_bytes:
                most_bytes, at = live_bytes, i
        return most_bytes, at

    def categories(self, at: int) -> dict[str, int]:
        """Return the bytes that are alive after an event, by what they are for."""
        events = ((block, n_bytes) for block, n_bytes, _ in self.events[: at + 1])
        found: dict[str, int] = {}
        for block, n_bytes in {**self.existing, **dict(events)}.items():
            kept = block.phase == "forward" and block.outlived_forward
            category = block.category or ("activations" if kept else "temporaries")
            found[category] = found.get(category, 0) + n_bytes
        return found

    def of_a_later_step(self) -> MemoryRecord | None:
        """Run the same work again, with the state that the optimizer's first step made.

        The gradients are taken to be freed in between, as ``zero_grad()`` does. None where the
        optimizer has made no state.
        """
        made = {
            event.block: event.n_bytes
            for event in self.events
            if event.block not in self.existing
            and (event.block.category == "optimizer state" or event.block.is_of_library)
        }
        # those that are alive at the end, by their last events
        state = {block: n_bytes for block, n_bytes in made.items() if n_bytes}
        if all(block.is_of_library for block in state):
            return None
        events = [event for event in self.events if event.block not in state]
        return MemoryRecord({**self.existing, **state}, events)


def replay(record: MemoryRecord, budget: int | None = None) -> tuple[int, int, bool]:
    """Allocate and free all blocks of a record in order, by an allocator like CUDA's.

    The allocator is taken to be empty before the work: what was there before it is allocated first,
    in the order of the record. One stream has all blocks: gradients that CUDA computes on the
    stream of their forward pass are on it, and what other streams of the user's take would be
    cached apart.

    Args:
        record: of the work.
        budget: the bytes that may be reserved; what is cached is given back where they do not do,
            as CUDA does. Where that is too little, the figures are those without a refusal.

    Returns:
        The most bytes of blocks in use, rounded as they are; the most bytes of segments, in use or
        cached; and whether the budget was never exceeded.
    """
    memory = CachedBlocks(budget)
    places = {block: memory.allocate(n_bytes) for block, n_bytes in record.existing.items()}
    for block, n_bytes, _ in record.events:
        # a storage that grows has both until its bytes are copied
        before = places.pop(block, None)
        if n_bytes:
            places[block] = memory.allocate(n_bytes)
        memory.free(before)
    return memory.allocated_peak_bytes, memory.reserved_peak_bytes, memory.fits
