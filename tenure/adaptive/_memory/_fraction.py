"""A net below a counted limit: the share of the device's memory that the allocator may reserve.

It catches what counting can't see: what an operation allocates inside itself, libraries, compiled
code and other threads. It is loose, because an allocator reserves whole segments, and keeps the
free parts of those that are still in use: legitimate work must not meet it.

The fraction belongs to the process, whatever thread set it. Invariant: while nets are open it is
that of the strictest, in whatever order they end; after the last it is what it was before.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from tenure._cuda_blocks import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from tenure._torch.device_allocator import workspace_bytes

_NEEDED = (
    "empty_cache",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "memory_reserved",
    "set_per_process_memory_fraction",
)
_SEGMENTS_BYTES = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
"""A segment of the pool of small blocks and one of that of large ones."""
_N_STREAMS = 2
"""Each stream has pools of its own: that of the program, and one for copies."""
_N_THREADS = 2
"""Each thread has workspaces of its own: that of the program, and that of its backward passes."""
_lock = threading.RLock()
_open_nets: dict[torch.device, list[FractionNet]] = {}
_fractions_before: dict[torch.device, float] = {}


class FractionNet:
    """Lets the allocator of a device reserve some more than it had reserved at the opening.

    Args:
        limit_bytes: what the storages of the block may hold.
        device: a device whose allocator has a fraction.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._limit_bytes = limit_bytes
        self._allowed_bytes = 0

    def open(self) -> None:
        """Lower the fraction; unused memory that the allocator had cached is given back first."""
        with _lock:
            if not _open_nets.setdefault(self._device, []):
                before = self._module.get_per_process_memory_fraction(self._device)
                _fractions_before[self._device] = before
            self._module.empty_cache()
            reserved_bytes = int(self._module.memory_reserved(self._device))
            self._allowed_bytes = reserved_bytes + net_bytes(self._limit_bytes, self._device)
            _open_nets[self._device].append(self)
            self._apply()

    def close(self) -> None:
        """Take the net away, as far as it was opened."""
        with _lock:
            # an interrupt may have come before it was among them
            if self in _open_nets.get(self._device, ()):
                _open_nets[self._device].remove(self)
                self._apply()

    def _apply(self) -> None:
        nets = _open_nets[self._device]
        if nets:
            allowed_bytes = min(net._allowed_bytes for net in nets)
            fraction = min(
                _fractions_before[self._device],
                allowed_bytes / _total_bytes(self._module, self._device),
            )
        else:
            fraction = _fractions_before.pop(self._device)
        self._module.set_per_process_memory_fraction(fraction, self._device)


def net_bytes(limit_bytes: int, device: torch.device) -> int:
    """What an allocator may have to reserve so that storages of so many bytes fit.

    Twice as much: two blocks of 7 MiB leave 6 of a segment of 20, and free parts between blocks
    pile up (1.9 times at the most in random programs of 64 MiB and more). Each pool may have a
    segment that is hardly used, and the libraries take what they need for their work.
    """
    workspaces_bytes = sum(workspace_bytes(device).values())
    slack_bytes = _N_STREAMS * _SEGMENTS_BYTES + _N_THREADS * workspaces_bytes
    return 2 * limit_bytes + slack_bytes


def keeps_fractions(device: torch.device) -> bool:
    """Whether the allocator of ``device`` has a fraction that can be read, set and restored."""
    module: Any = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in _NEEDED):
        return False
    try:
        module.get_per_process_memory_fraction(device)
    except RuntimeError:
        # A pluggable allocator, which has none.
        return False
    return True


def _total_bytes(module: Any, device: torch.device) -> int:
    return int(module.get_device_properties(device).total_memory)
