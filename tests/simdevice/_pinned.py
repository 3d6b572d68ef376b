"""Pinned host memory: the address ranges that the device may copy from and to on its own.

A range counts as pinned from `register` to `unregister`, whoever owns the memory; what
`pin_memory()` made is unpinned when its storage dies. Each range has a history for the race
detector, because two streams can race over host bytes too.
"""

import weakref
from bisect import bisect_right
from dataclasses import dataclass

import torch

from ._races import History, Span

_HOST_STREAM_ID = -1  # no stream: the home of memory that the host owns

# cudaErrorInvalidValue, cudaErrorHostMemoryAlreadyRegistered, cudaErrorHostMemoryNotRegistered:
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_INVALID_VALUE, _ALREADY_REGISTERED, _NOT_REGISTERED = 1, 712, 713


@dataclass(slots=True)
class _Range:
    low: int
    high: int
    history: History
    is_registered: bool = False

    def overlaps(self, low: int, high: int) -> bool:
        return self.low < high and low < self.high


class PinnedMemory:
    """The pinned ranges, by address."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}
        self._lows: list[int] = []

    def register(self, address: int, n_bytes: int) -> int:
        """Pin `n_bytes` from `address`; returns the code of `cudaHostRegister`."""
        if n_bytes <= 0:
            return _INVALID_VALUE
        if any(pinned.overlaps(address, address + n_bytes) for pinned in self._ranges.values()):
            return _ALREADY_REGISTERED
        self._pin(address, n_bytes, is_registered=True)
        return 0

    def unregister(self, address: int) -> int:
        """Undo `register`; returns the code of `cudaHostUnregister`."""
        found = self._ranges.get(address)
        if found is None or not found.is_registered:
            return _NOT_REGISTERED
        self._unpin(address)
        return 0

    def pin_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pin the storage of a host tensor until it dies; returns the tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes():
            self._pin(address, storage.nbytes())
            weakref.finalize(storage, self._unpin, address).atexit = False
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

    def start(self) -> None:
        """Drop what earlier programs registered, and what they did to all other ranges."""
        for address, pinned in list(self._ranges.items()):
            pinned.history.accesses.clear()
            if pinned.is_registered:
                self._unpin(address)

    def _pin(self, address: int, n_bytes: int, *, is_registered: bool = False) -> None:
        history = History(_HOST_STREAM_ID)
        self._ranges[address] = _Range(address, address + n_bytes, history, is_registered)
        self._lows = sorted(self._ranges)

    def _unpin(self, address: int) -> None:
        self._ranges.pop(address, None)
        self._lows = sorted(self._ranges)

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
