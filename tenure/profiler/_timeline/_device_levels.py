"""The level of an accelerator, by the counters of its allocator, which are dear to read.

Invariant: nothing is reset. What is highest between two readings is known as long as the counter of
the peak rises; one that stands higher from before hides it.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from tenure._cuda_blocks import BLOCK_BYTES, up_to

from .._trace import allocated_on

# a reading for fifty times as long as it takes, unless there may be a new peak
_SHARE = 50


class DeviceLevels:
    """What is in use on one device.

    Args:
        device: a device whose module has ``memory_stats()``.

    Attributes:
        known_bytes: of the storages that are known to be alive, in whole blocks.
        earlier_peak_bytes: where the counter of the peak stood when the recording began.
    """

    def __init__(self, device: torch.device) -> None:
        self.known_bytes = 0
        self._module: Any = torch.get_device_module(device)
        self._device = device
        figures = allocated_on(self._module, device)
        self.earlier_peak_bytes = self._peak_bytes = figures.peak
        self._level_bytes, self._known_then = figures.current, 0
        self._highest = figures.current
        self._next_ns = 0

    @property
    def level_bytes(self) -> int:
        """What is in use: as last read, and what has come and gone since that is known."""
        return self._level_bytes + self.known_bytes - self._known_then

    def begin(self, known_bytes: int) -> None:
        """Say what of the level at the beginning is known."""
        self.known_bytes = self._known_then = known_bytes

    def look(self) -> int:
        """The most that has been in use since the last look, as far as it is known."""
        level = self.level_bytes
        if level <= self._highest and time.perf_counter_ns() < self._next_ns:
            return level
        return self.read()

    def read(self) -> int:
        """The same from the counters, however dear."""
        began_ns = time.perf_counter_ns()
        figures = allocated_on(self._module, self._device)
        ended_ns = time.perf_counter_ns()
        self._next_ns = ended_ns + _SHARE * (ended_ns - began_ns)
        self._level_bytes, self._known_then = figures.current, self.known_bytes
        high = figures.peak if figures.peak > self._peak_bytes else figures.current
        self._peak_bytes = figures.peak
        self._highest = max(self._highest, high)
        return high


def block_bytes(n_bytes: int, device: torch.device) -> int:
    """What a storage takes of its allocator; CUDA's rounds."""
    return up_to(n_bytes, BLOCK_BYTES) if device.type == "cuda" else n_bytes
