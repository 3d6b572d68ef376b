"""How much memory an attempt may use, and how much the last one needed, where that can be told.

Three sources: the allocator of a device, the budgets that count on this thread, and the host. A
meter is made after an out-of-memory error only; nothing here runs on the way without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tenure._cuda_blocks import SMALL_SEGMENT_BYTES
from tenure._devices import accelerator_of, counters_of, free_memory, told_by
from tenure._host_memory import free_host_bytes
from tenure._torch.device_allocator import has_expandable_segments

from ._counting import CountingMode, counting_on


class HeldBytes(NamedTuple):
    """The bytes that an allocator holds of a device.

    Attributes:
        allocated_bytes: what tensors use.
        active_bytes: that, and what the work of a stream still uses.
        reserved_bytes: all that it holds.
        split_bytes: the free parts of segments that are in use: they can't be given back.
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    split_bytes: int

    @property
    def unused_bytes(self) -> int:
        """What no tensor uses, wherever it lies."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def spare_bytes(self) -> int:
        """What can be given back to the device, and so serve anything."""
        return self.reserved_bytes - self.active_bytes - self.split_bytes


def held_by(module: Any, device: torch.device) -> HeldBytes:
    """Read an allocator.

    Raises:
        RuntimeError: it does not tell what it holds beside what is in use.
    """
    counters = counters_of(module, device)
    allocated_bytes, reserved_bytes = counters.allocated, counters.reserved
    # A cache that is not told must not pass for an empty one.
    if allocated_bytes is None or reserved_bytes is None:
        raise RuntimeError(f"The allocator of {device} does not tell what it holds.")
    return HeldBytes(
        allocated_bytes,
        # not every backend counts it
        max(allocated_bytes, counters.active or 0),
        max(allocated_bytes, reserved_bytes),
        0 if has_expandable_segments() else counters.inactive_split or 0,
    )


class _Source(Protocol):
    @property
    def is_in_segments(self) -> bool:
        """Whether memory is taken in segments, and not to the byte."""
        ...

    def available_bytes(self) -> int:
        """Return the bytes that may still be allocated."""
        ...

    def restart(self) -> None:
        """Begin to note the most that is used."""

    def needed_bytes(self) -> int | None:
        """Return the peak above the use at the restart; None if it is not reported."""


class MemoryMeter:
    """The memory of one device, as this thread may use it."""

    __slots__ = ("_sources",)

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._sources = sources

    def available_bytes(self) -> int:
        """Return the bytes that may still be allocated."""
        return min(source.available_bytes() for source in self._sources)

    def restart(self) -> None:
        """Begin to note the most that is used."""
        for source in self._sources:
            source.restart()

    def needed_bytes(self) -> int | None:
        """Return the peak above the use at the restart; None if it is not reported."""
        # the most of them: an allocator sees what counting can't, such as workspaces
        told = (source.needed_bytes() for source in self._sources)
        return max((n_bytes for n_bytes in told if n_bytes is not None), default=None)

    @property
    def is_in_segments(self) -> bool:
        """Whether what is available is taken in whole segments, with what is free in them."""
        return all(source.is_in_segments for source in self._sources)

    @property
    def measures(self) -> bool:
        """Whether it can tell what work needs."""
        return self.needed_bytes() is not None


def meter_for(device: str | None) -> MemoryMeter | None:
    """Return the meter of the memory that an OomInfo names; None if it is not known."""
    if device is None:
        return None
    sources: list[_Source] = [_BudgetMeter(mode) for mode in counting_on(device)]
    sources += [_HostMeter()] if device == "cpu" else _allocator_of(device)
    return MemoryMeter(sources) if sources else None


class _Allocator:
    """The caching allocator of a device.

    What it holds and nothing uses is available, save the free parts of segments that are in use:
    they serve only what is smaller than they are, and are never given back.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._base_bytes = 0
        # what was reserved and in use at the restart, where the cache was empty; None elsewhere
        self._base_reserved_bytes: int | None = None

    @property
    def is_in_segments(self) -> bool:
        # all of CUDA's are multiples of that; what is counted to the byte hardly ever is
        reserved_bytes = held_by(self._module, self._device).reserved_bytes
        return reserved_bytes % SMALL_SEGMENT_BYTES == 0

    def available_bytes(self) -> int:
        held = held_by(self._module, self._device)
        told = free_memory(self._module, self._device)
        if told is None:
            raise RuntimeError(f"the free memory of {self._device} is not known")
        # Not the free parts of segments in use: work that needs several pieces does not fit there
        # though their sum does. Where all free memory lies so, the size found is too small rather
        # than one that fails.
        return told[0] + held.spare_bytes

    def restart(self) -> None:
        # or nothing would tell which of the cache the work used; while another thread captures a
        # graph it fails
        with contextlib.suppress(RuntimeError):
            self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)
        held = held_by(self._module, self._device)
        self._base_bytes = held.allocated_bytes
        self._base_reserved_bytes = None if held.spare_bytes > 0 else held.reserved_bytes

    def needed_bytes(self) -> int:
        needed_bytes = int(self._module.max_memory_allocated(self._device)) - self._base_bytes
        # Where the cache was empty, what was reserved for the work says what it takes of the
        # device, with what is rounded up and cut up. Else nothing tells which of the cache it used.
        reserved_bytes = told_by(self._module, "max_memory_reserved", self._device)
        if self._base_reserved_bytes is None or reserved_bytes is None:
            return needed_bytes
        return max(needed_bytes, int(reserved_bytes) - self._base_reserved_bytes)


class _BudgetMeter:
    """A memory budget that counts; the peak that its user reads stays the peak of all its block."""

    is_in_segments = False

    def __init__(self, mode: CountingMode) -> None:
        self._mode = mode
        self._base_bytes = 0

    def available_bytes(self) -> int:
        return self._mode.free_bytes

    def restart(self) -> None:
        self._mode.restart_peak()
        self._base_bytes = self._mode.live_bytes

    def needed_bytes(self) -> int:
        return self._mode.recent_peak_bytes - self._base_bytes


class _HostMeter:
    """The memory of the machine; what work needed of it can't be told."""

    is_in_segments = False

    def available_bytes(self) -> int:
        return free_host_bytes()

    def restart(self) -> None:
        pass

    def needed_bytes(self) -> None:
        return None


def _allocator_of(device: str) -> list[_Source]:
    found = accelerator_of(device)
    if found is None:
        return []
    allocator = _Allocator(*found)
    # asked once, for all that the searches ask: a meter that is there has to be able to answer
    try:
        allocator.available_bytes()
        allocator.needed_bytes()
    # a device without statistics
    except Exception:
        return []
    return [allocator]
