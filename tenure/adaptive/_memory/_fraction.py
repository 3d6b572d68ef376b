"""A limit that an allocator keeps itself, as a fraction of the memory of its device.

The fraction belongs to the process, whatever thread set it. Invariant: while limits are open it
is that of the strictest, in whatever order they end; after the last it is what it was before.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_NEEDED = (
    "empty_cache",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "max_memory_allocated",
    "memory_allocated",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)
_lock = threading.RLock()
_open_limits: dict[torch.device, list[FractionLimit]] = {}
_fractions_before: dict[torch.device, float] = {}


class FractionLimit:
    """Some bytes more than were allocated when it was opened, on one device."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._limit_bytes = limit_bytes
        self._base_bytes = 0
        self._peak_bytes = 0
        self._is_open = False
        self._live_at_end = 0

    @property
    def live_bytes(self) -> int:
        """What is allocated beyond the bytes at the opening, now or when it was closed."""
        return self._live_now() if self._is_open else self._live_at_end

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated beyond the bytes at the opening."""
        if self._is_open:
            self._note_peak()
        return self._peak_bytes

    def open(self) -> None:
        """Lower the fraction; unused memory that the allocator had cached is given back first."""
        with _lock:
            limits = _open_limits.setdefault(self._device, [])
            if not limits:
                before = self._module.get_per_process_memory_fraction(self._device)
                _fractions_before[self._device] = before
            for limit in limits:
                limit._note_peak()
            self._module.empty_cache()
            self._module.reset_peak_memory_stats(self._device)
            self._base_bytes = self._module.memory_allocated(self._device)
            limits.append(self)
            self._is_open = True
            self._apply()

    def close(self) -> bool:
        """Take the limit back; True, because limits may end in any order."""
        with _lock:
            self._note_peak()
            self._live_at_end = self._live_now()
            self._is_open = False
            _open_limits[self._device].remove(self)
            self._apply()
        return True

    def _live_now(self) -> int:
        allocated_bytes: int = self._module.memory_allocated(self._device)
        return max(0, allocated_bytes - self._base_bytes)

    def _note_peak(self) -> None:
        peak_bytes = self._module.max_memory_allocated(self._device) - self._base_bytes
        self._peak_bytes = max(self._peak_bytes, peak_bytes)

    def _apply(self) -> None:
        limits = _open_limits[self._device]
        if limits:
            allowed_bytes = min(limit._base_bytes + limit._limit_bytes for limit in limits)
            total_bytes = self._module.get_device_properties(self._device).total_memory
            fraction = min(_fractions_before[self._device], allowed_bytes / total_bytes)
        else:
            fraction = _fractions_before.pop(self._device)
        self._module.set_per_process_memory_fraction(fraction, self._device)


def keeps_fractions(device: torch.device) -> bool:
    """Whether the allocator of ``device`` has a fraction that can be read, set and restored."""
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in _NEEDED)


def allowed_bytes(device: torch.device) -> int | None:
    """What the allocator may hold in all; None where it has no fraction."""
    if not keeps_fractions(device):
        return None
    module: Any = torch.get_device_module(device)
    total_bytes = int(module.get_device_properties(device).total_memory)
    return int(module.get_per_process_memory_fraction(device) * total_bytes)


def note_peaks(device: torch.device) -> None:
    """Let the open limits note the peak, which is about to be reset."""
    with _lock:
        for limit in _open_limits.get(device, ()):
            limit._note_peak()
