"""What a device leaves for weights, as passes show it: what is free, and what computation needs.

Nothing is synchronized, emptied or reset for it. Memory that other processes take is seen in what
the device has free; what the allocator has cached is computation's, as far as it was needed.

Invariant: a need that was seen is not forgotten within the passes that are remembered.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from tenure._account import available_bytes
from tenure._cuda_blocks import LARGE_SEGMENT_BYTES
from tenure._devices import free_memory, told_by
from tenure._errors import PagingError
from tenure._host_memory import free_host_bytes

_REMEMBERED = 8
_FRAGMENTS = 1 / 8
"""Of what computation allocates: what its allocator may lose between blocks."""
_MARGIN_SHARE = 1 / 32
"""Of the device's memory: what is left free beside what computation was seen to need."""


class MemoryReading(NamedTuple):
    """The memory of a device at one moment.

    Attributes:
        free_bytes: of the device.
        total_bytes: of the device; of a host, what was free at first.
        cached_bytes: what this process's allocator has and nothing uses.
        allocated_bytes: what tensors have.
        peak_bytes: the most that they had.
    """

    free_bytes: int
    total_bytes: int
    cached_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0


def read(device: torch.device) -> MemoryReading:
    """Look at a device.

    Raises:
        PagingError: it can't tell what is free.
    """
    if device.type == "cpu":
        free_bytes = available_bytes(device, free_host_bytes())
        return MemoryReading(free_bytes, free_bytes)
    module = torch.get_device_module(device)
    told = free_memory(module, device)
    if told is None:
        raise PagingError(
            f"torch.{device.type} can't tell how much of {str(device)!r} is free, which "
            'budget="auto" follows. Write budget= as a number of bytes, such as "6GiB".'
        )
    # Not the flat form: a hundred names are made for that, each time.
    nested = told_by(module, "memory_stats_as_nested_dict", device) or {}
    reserved = nested.get("reserved_bytes", {}).get("all", {})
    allocated = nested.get("allocated_bytes", {}).get("all", {})
    now_bytes = allocated.get("current", 0)
    cached_bytes = max(0, reserved.get("current", 0) - now_bytes)
    free_bytes, total_bytes = told
    free_bytes = min(free_bytes, available_bytes(device, free_bytes + cached_bytes))
    return MemoryReading(free_bytes, total_bytes, cached_bytes, now_bytes, allocated.get("peak", 0))


class Gauge:
    """Looks at one device.

    Args:
        device: the device.

    Raises:
        PagingError: it can't tell what is free.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = read(device)
        self._total_bytes = self._last.total_bytes
        # What a pass needs for moments between two looks, as far as the allocator's peaks tell.
        self._moment_bytes = 0
        # The most that computation took between two looks.
        self._stride_bytes = 0
        self._is_in_segments = False
        # What weights could have had, at the looks of a pass and in the passes before it.
        self._looks: list[int] = []
        self._rooms: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def is_sure(self) -> bool:
        """It remembers as many passes as it can."""
        return len(self._rooms) == _REMEMBERED

    @property
    def room_bytes(self) -> int:
        """What weights may have so that the next pass has what the last ones needed."""
        return max(0, min([*self._rooms, self._left_bytes]) - self._margin_bytes)

    def free_bytes(self) -> int:
        """Return the bytes that are free for the first weights."""
        return self._space_bytes(0)

    def short_bytes(self, held_bytes: int) -> int:
        """Return the bytes that computation lacked at the last check; 0 if half the margin is free.

        Where a pass needs more than any that is remembered, as the first one does, what it took
        between two looks it may take once more before the next.
        """
        room_bytes, margin_bytes = self._looks[-1], self._margin_bytes
        is_known = room_bytes >= min(self._rooms, default=room_bytes + 1)
        stride_bytes = 0 if is_known else 2 * self._stride_bytes
        free_bytes = room_bytes - held_bytes
        if free_bytes >= max(margin_bytes // 2, stride_bytes):
            return 0
        return max(margin_bytes, 2 * stride_bytes) - free_bytes

    def look(self, held_bytes: int) -> None:
        """Note what is free at this moment of a pass.

        Args:
            held_bytes: what weights have of the device.
        """
        last, now = self._last, read(self._device)
        if now.peak_bytes < last.peak_bytes:
            # Somebody has begun to count anew.
            self._moment_bytes = 0
        elif now.peak_bytes > last.peak_bytes:
            moment_bytes = now.peak_bytes - max(last.allocated_bytes, now.allocated_bytes)
            self._moment_bytes = max(self._moment_bytes, moment_bytes)
        self._last = now
        self._is_in_segments |= now.cached_bytes > 0
        room_bytes = self._space_bytes(held_bytes)
        if self._looks:
            self._stride_bytes = max(self._stride_bytes, self._looks[-1] - room_bytes)
        self._looks.append(room_bytes)

    def rebase(self) -> None:
        """Weights were given back or taken: what is counted from here on is computation's."""
        self._last = read(self._device)

    def end_pass(self) -> None:
        """Remember what the pass that is over has left for weights."""
        self._rooms.append(self._left_bytes)
        self._looks.clear()

    def forget(self) -> None:
        """Be sure only after as many passes as at first."""
        self._rooms.clear()

    @property
    def _margin_bytes(self) -> int:
        # The first tensor of another size may need a segment of its own.
        least_bytes = LARGE_SEGMENT_BYTES if self._is_in_segments else 0
        return max(int(self._total_bytes * _MARGIN_SHARE), least_bytes)

    @property
    def _left_bytes(self) -> int:
        """The bytes that the pass has left for weights so far."""
        return min(self._looks) - self._moment_bytes

    def _space_bytes(self, held_bytes: int) -> int:
        """Return the room for weights at the last look: of the cache, the part not in fragments."""
        now = self._last
        used_bytes = max(0, now.allocated_bytes - held_bytes)
        fragments_bytes = int(used_bytes * _FRAGMENTS) + 2 * LARGE_SEGMENT_BYTES
        return held_bytes + now.free_bytes + max(0, now.cached_bytes - fragments_bytes)
