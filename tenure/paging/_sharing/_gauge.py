"""What a device leaves for weights, as passes show it: what is free, and what computation needs.

Nothing is synchronized, emptied or reset for it. Memory that other processes take is seen in what
the device has free; what the allocator has cached is computation's, as far as it was needed.

Invariant: a need that was seen is not forgotten within the passes that are remembered.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from tenure._account import available_bytes
from tenure._cuda_blocks import LARGE_SEGMENT_BYTES
from tenure._devices import free_memory, told_by
from tenure._errors import PagingError
from tenure._host_memory import free_host_bytes

from ._policy import margin_bytes

_REMEMBERED = 8
_FRAGMENTS = 1 / 8
"""Of what computation allocates: what its allocator may lose between blocks."""


class Reading(NamedTuple):
    """The memory of a device at one moment.

    Attributes:
        free_bytes: of the device.
        total_bytes: of the device; of a host, what was free at first.
        reserved: what this process's allocator has of it, now and at the most.
        allocated: what tensors have of that.
    """

    free_bytes: int
    total_bytes: int
    reserved: tuple[int, int]
    allocated: tuple[int, int]

    @property
    def cached_bytes(self) -> int:
        """What the allocator has and nothing uses."""
        return max(0, self.reserved[0] - self.allocated[0])


def read(device: torch.device) -> Reading:
    """Look at a device.

    Raises:
        PagingError: it can't tell what is free.
    """
    if device.type == "cpu":
        free_bytes = available_bytes(device, free_host_bytes())
        return Reading(free_bytes, free_bytes, (0, 0), (0, 0))
    module = torch.get_device_module(device)
    told = free_memory(module, device)
    if told is None:
        raise PagingError(
            f"torch.{device.type} can't tell how much of {str(device)!r} is free, which "
            'budget="auto" follows. Write budget= as a number of bytes, such as "6GiB".'
        )
    # Not the flat form: a hundred names are made for that, each time.
    nested = told_by(module, "memory_stats_as_nested_dict", device) or {}
    free_bytes, total_bytes = told
    reading = Reading(
        free_bytes,
        total_bytes,
        _now_and_peak(nested, "reserved"),
        _now_and_peak(nested, "allocated"),
    )
    allowed_bytes = available_bytes(device, free_bytes + reading.cached_bytes)
    return reading._replace(free_bytes=min(free_bytes, allowed_bytes))


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
        self._moments = [0, 0]
        self._least: list[int] | None = None
        # As if nothing were outside of this process's allocator.
        self._rooms: deque[int] = deque(maxlen=_REMEMBERED)
        self._is_in_segments = self._last.cached_bytes > 0
        # The most that computation took between two looks of a pass.
        self._stride_bytes = 0
        self._before_bytes: int | None = None

    @property
    def margin_bytes(self) -> int:
        """What is to be left free beside what was needed."""
        bytes_beside = margin_bytes(self._total_bytes, list(self._rooms))
        # The first tensor of another size may need a segment of its own.
        return max(bytes_beside, LARGE_SEGMENT_BYTES if self._is_in_segments else 0)

    def free_bytes(self, held_bytes: int) -> int:
        """What computation could have at the last look, when weights had so much."""
        return max(self._spaces(held_bytes)) - held_bytes

    @property
    def room_bytes(self) -> int | None:
        """What weights may have so that the next pass has what the last ones needed."""
        if not self._rooms:
            return None
        # What other processes have now they may not have had in those passes.
        before_bytes = min(self._rooms) - self._outside_bytes
        return min([before_bytes, *self._left()]) - self.margin_bytes

    @property
    def is_sure(self) -> bool:
        """Whether many passes are remembered, and one of them has left no more than is left now."""
        return len(self._rooms) == _REMEMBERED and self._is_known(self._before_bytes)

    def _is_known(self, room_bytes: int | None) -> bool:
        """Whether a pass that is remembered has left so little for weights."""
        if room_bytes is None or not self._rooms:
            return False
        return room_bytes >= min(self._rooms) - self._outside_bytes

    def short_bytes(self, held_bytes: int) -> int:
        """What computation lacks at the last look; 0 as long as half of the margin is there.

        Where a pass needs more than any that is remembered, as the first one does, what it took
        between two looks it may take once more before the next.
        """
        room_bytes = max(self._spaces(held_bytes))
        free_bytes, margin_bytes = room_bytes - held_bytes, self.margin_bytes
        stride_bytes = 0 if self._is_known(room_bytes) else 2 * self._stride_bytes
        if free_bytes >= max(margin_bytes // 2, stride_bytes):
            return 0
        return max(margin_bytes, 2 * stride_bytes) - free_bytes

    def look(self, held_bytes: int) -> None:
        """Note what is free at this moment of a pass.

        Args:
            held_bytes: what weights have of the device.
        """
        last, now = self._last, read(self._device)
        for i, name in enumerate(("reserved", "allocated")):
            before, after = getattr(last, name), getattr(now, name)
            if after[1] < before[1]:
                # Somebody has begun to count anew.
                self._moments[i] = 0
            elif after[1] > before[1]:
                moment = after[1] - max(before[0], after[0])
                self._moments[i] = max(self._moments[i], moment)
        self._last = now
        self._is_in_segments |= now.cached_bytes > 0
        spaces = self._spaces(held_bytes)
        if self._before_bytes is not None:
            self._stride_bytes = max(self._stride_bytes, self._before_bytes - max(spaces))
        self._before_bytes = max(spaces)
        least = self._least or spaces
        self._least = [min(pair) for pair in zip(least, spaces, strict=True)]

    def _spaces(self, held_bytes: int) -> list[int]:
        """What weights could have had at the last look.

        Either what the device has left, and its allocator does not keep for computation, or what
        would be left if the allocator gave its cache back; then segments are taken anew.
        """
        now = self._last
        used_bytes = max(0, now.allocated[0] - held_bytes)
        fragments_bytes = int(used_bytes * _FRAGMENTS) + 2 * LARGE_SEGMENT_BYTES
        free_bytes = held_bytes + now.free_bytes
        return [free_bytes, free_bytes + now.cached_bytes - fragments_bytes]

    def rebase(self) -> None:
        """Weights were given back or taken: what is counted from here on is computation's."""
        self._last = read(self._device)

    def end_pass(self) -> None:
        """Remember what the pass that is over has left for weights."""
        self._rooms.extend(left + self._outside_bytes for left in self._left())
        self._least = self._before_bytes = None

    @property
    def _outside_bytes(self) -> int:
        """What other processes have of the device; of a host's memory that is not told."""
        if self._device.type == "cpu":
            return 0
        return self._total_bytes - self._last.free_bytes - self._last.reserved[0]

    def _left(self) -> list[int]:
        """What the pass has left for weights so far; nothing before its first look."""
        if self._least is None:
            return []
        pairs = zip(self._least, self._moments, strict=True)
        return [max(space - need for space, need in pairs)]


def _now_and_peak(nested: dict[str, Any], name: str) -> tuple[int, int]:
    figures = nested.get(f"{name}_bytes", {}).get("all", {})
    return int(figures.get("current", 0)), int(figures.get("peak", 0))
