"""Pinned host memory: the address ranges that the device may copy from and to on its own.

A range counts as pinned from `pin_range` to `unpin_range`, whoever owns the memory; what
`pin_memory()` made is unpinned when its storage dies. Each range has a history for the race
detector, because two streams can race over host bytes too.
"""

import weakref
from bisect import bisect_right
from dataclasses import dataclass

import torch

from ._races import History, Span

_HOST_STREAM_ID = -1  # no stream: the home of memory that the host owns


@dataclass(slots=True)
class _Range:
    low: int
    high: int
    history: History


class PinnedMemory:
    """The pinned ranges, by address."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}
        self._lows: list[int] = []

    def pin_range(self, address: int, n_bytes: int) -> None:
        """Pin `n_bytes` from `address`, as `cudaHostRegister` does."""
        history = History(_HOST_STREAM_ID)
        self._ranges[address] = _Range(address, address + n_bytes, history)
        self._lows = sorted(self._ranges)

    def unpin_range(self, address: int) -> None:
        """Undo `pin_range` for the range that begins at `address`; unknown ones are ignored."""
        self._ranges.pop(address, None)
        self._lows = sorted(self._ranges)

    def pin_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pin the storage of a host tensor until it dies; returns the tensor."""
        storage = tensor.untyped_storage()
        self.pin_range(storage.data_ptr(), storage.nbytes())
        weakref.finalize(storage, self.unpin_range, storage.data_ptr()).atexit = False
        return tensor

    def span(self, tensor: torch.Tensor) -> Span | None:
        """The bytes of a host tensor within its pinned range; None if it is not pinned."""
        found = self._range_of(tensor)
        if found is None:
            return None
        low = tensor.data_ptr() - found.low
        return Span(found.history, low, low + extent_bytes(tensor))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether all bytes of a host tensor lie in one pinned range."""
        return self._range_of(tensor) is not None

    def forget_histories(self) -> None:
        """Drop what earlier programs did to the ranges."""
        for pinned in self._ranges.values():
            pinned.history.accesses.clear()

    def _range_of(self, tensor: torch.Tensor) -> _Range | None:
        address = tensor.data_ptr()
        index = bisect_right(self._lows, address) - 1
        if index < 0:
            return None
        found = self._ranges[self._lows[index]]
        return found if address + extent_bytes(tensor) <= found.high else None


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size()


pinned_memory = PinnedMemory()
