"""Host memory as the device uses it: its bytes, what of it is pinned, copies not waited for.

The device may copy from and to pinned memory on its own. A range counts as pinned from `register`
to `unregister`, whoever owns the memory; what `pin_memory()` made is unpinned when its storage
dies. Each range has a history for the race detector, because two streams can race over host bytes
too.

A copy into pinned memory delivers its bytes when the host waits, or when device work ordered after
it reads them; until then the destination holds 0xFF bytes, NaN for floats, so that reading early is
loud. A copy out of pinned memory must find its source unchanged when the host waits.
"""

import math
import threading
import weakref
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from tenure._text import parse_bytes

from .._allocator._runtime import (
    ALREADY_REGISTERED,
    INVALID_VALUE,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    SUCCESS,
    error_of,
    last_error,
)
from .._torch_backend import required_elements
from ._races import History, RaceDetector, Span, VectorClock, stream_name

POISON = 0xFF
"""What memory holds that nothing has written yet: NaN for floats, so that reading it is loud."""
# That of no stream: where memory is at home that the host owns.
_HOST_STREAM_ID = -1
_ADVICE = "Wait for an event recorded after the copy, or synchronize, before the host touches it."


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as uint8[*size, bytes of an element], whatever the strides."""
    width = tensor.element_size()
    strides = (*(step * width for step in tensor.stride()), 1)
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    offset = int(tensor.storage_offset()) * width
    return raw.set_(tensor.untyped_storage(), offset, (*tensor.shape, width), strides)


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all memory of a storage as uint8[bytes]."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


@dataclass(slots=True)
class _Range:
    low: int
    high: int
    history: History
    is_registered: bool = False
    is_of_this_start: bool = True

    def overlaps(self, low: int, high: int) -> bool:
        return self.low < high and low < self.high


def check_failure(when: int | str | None) -> None:
    """Refuse what `fail_pinning` can't mean."""
    if isinstance(when, str):
        _ = when == "all" or parse_bytes(when)
    elif when is not None and (type(when) is not int or when < 1):
        raise ValueError(
            f'fail_pinning={when!r}: give "all", a size as "64KiB", or a number: what is pinned is'
            " counted from 1."
        )


class PinnedMemory:
    """The pinned ranges, by address."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}
        self.fail(None)

    def fail(self, when: int | str | None) -> None:
        """Make pinning fail: the `when`-th from now, once; `"all"`; or what exceeds a size.

        Args:
            when: a number from 1; `"all"`; the most bytes that may be pinned, as `"64KiB"`, which
                stands for the system's limit of locked memory; None lets all succeed.
        """
        check_failure(when)
        self._until_failure = when if isinstance(when, int) else None
        self._limit_bytes: float = math.inf
        if isinstance(when, str):
            self._limit_bytes = 0 if when == "all" else parse_bytes(when)

    def register(self, address: int, n_bytes: int) -> int:
        """Pin `n_bytes` from `address`; returns the code of `cudaHostRegister`."""
        if n_bytes <= 0:
            return last_error.note(INVALID_VALUE)
        if any(pinned.overlaps(address, address + n_bytes) for pinned in self._ranges.values()):
            return last_error.note(ALREADY_REGISTERED)
        if self._fails(n_bytes):
            return last_error.note(OUT_OF_MEMORY)
        self._pin(address, n_bytes, is_registered=True)
        return SUCCESS

    def unregister(self, address: int) -> int:
        """Undo `register`; returns the code of `cudaHostUnregister`."""
        found = self._ranges.get(address)
        if found is None or not found.is_registered:
            return last_error.note(NOT_REGISTERED)
        del self._ranges[address]
        return SUCCESS

    def pin_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pin the storage of a host tensor until it dies; returns the tensor.

        Raises:
            torch.AcceleratorError: it was made to fail; torch clears the thread's last error then.
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes():
            if self._fails(storage.nbytes()):
                raise error_of(OUT_OF_MEMORY)
            self._pin(address, storage.nbytes())
            weakref.finalize(storage, self._ranges.pop, address, None).atexit = False
        return tensor

    def span(self, tensor: torch.Tensor) -> Span | None:
        """Return the bytes of a host tensor within its pinned range; None if it is not pinned."""
        low = tensor.data_ptr()
        high = low + extent_bytes(tensor)
        for each in list(self._ranges.values()):
            if each.low <= low and high <= each.high:
                return Span(each.history, low - each.low, high - each.low)
        return None

    def start(self) -> None:
        """Drop what earlier programs registered, and what they did to all other ranges."""
        self.fail(None)
        last_error.start()
        for address, pinned in list(self._ranges.items()):
            pinned.history.accesses.clear()
            pinned.is_of_this_start = False
            if pinned.is_registered:
                del self._ranges[address]

    def _fails(self, n_bytes: int) -> bool:
        if self._until_failure is not None:
            self._until_failure -= 1
            if self._until_failure == 0:
                self._until_failure = None
                return True
        ranges = [pinned for pinned in self._ranges.values() if pinned.is_of_this_start]
        pinned_bytes = sum(pinned.high - pinned.low for pinned in ranges)
        return pinned_bytes + n_bytes > self._limit_bytes

    def _pin(self, address: int, n_bytes: int, *, is_registered: bool = False) -> None:
        history = History(_HOST_STREAM_ID)
        self._ranges[address] = _Range(address, address + n_bytes, history, is_registered)


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the tensor's first element to the end of its last."""
    # size(): a parameter that is not initialized has no shape
    return required_elements(tensor.size(), tensor.stride()) * tensor.element_size()


pinned_memory = PinnedMemory()


@dataclass(frozen=True, slots=True)
class _LinkCopy:
    """One copy between a device and pinned memory.

    Attributes:
        stream_id: of the stream that it was launched on.
        tick: of that stream.
        host: the pinned memory.
        content: what is to be written there, or the checksum of what is read.
    """

    stream_id: int
    tick: int
    host: torch.Tensor
    content: Any


class HostCopies:
    """The asynchronous copies that the host has not waited for yet."""

    def __init__(self, detector: RaceDetector) -> None:
        self._detector = detector
        self._outgoing: list[_LinkCopy] = []
        self._incoming: list[_LinkCopy] = []
        # A backward pass copies on a thread of its own, while the caller's waits for copies.
        self._lock = threading.RLock()

    def send(self, source: torch.Tensor, stream_id: int, seen: VectorClock) -> None:
        """Remember that the newest launch of a stream reads `source`, which is pinned."""
        if self._detector.enabled:
            copy = _LinkCopy(stream_id, seen[stream_id], source.detach(), _checksum(source))
            with self._lock:
                self._outgoing.append(copy)

    def receive(
        self, destination: torch.Tensor, value: torch.Tensor, stream_id: int, seen: VectorClock
    ) -> None:
        """Write `value` to `destination`, pinned, once the host may know of that launch."""
        if not self._detector.enabled:
            destination.copy_(value)
            return
        # What still copies these bytes out, and ran before: checked now, or what is written here
        # would be taken for the program's.
        self._finish_outgoing(seen, destination)
        staged = torch.empty_like(destination).copy_(value)
        with self._lock:
            copy = _LinkCopy(stream_id, seen[stream_id], destination.detach(), staged)
            self._incoming.append(copy)
            bytes_of(destination).fill_(POISON)

    def deliver(self, seen: VectorClock | None, read: torch.Tensor | None = None) -> None:
        """Write to the host the copies that come before `seen`, all or those in `read`."""
        with self._lock:
            for copy in _taken(self._incoming, seen, read):
                copy.host.copy_(copy.content)

    def settle(self, host_seen: VectorClock | None) -> None:
        """Finish the copies that the host has now waited for; None: all, as at a program's end.

        Raises:
            RaceError: the source of one of them has changed since it was launched.
        """
        self.deliver(host_seen)
        self._finish_outgoing(host_seen)

    def _finish_outgoing(
        self, seen: VectorClock | None, overwritten: torch.Tensor | None = None
    ) -> None:
        """Check the copies out of the host that come before `seen`, of overwritten bytes or all."""
        # With the lock: a thread that has waited for the copy may then write these bytes.
        with self._lock:
            for copy in _taken(self._outgoing, seen, overwritten):
                if _checksum(copy.host) != copy.content:
                    self._detector.report(
                        f"host overwrite: pinned host memory was written while"
                        f" {stream_name(copy.stream_id)} may still copy it to the device. {_ADVICE}"
                    )


def _taken(
    copies: list[_LinkCopy], seen: VectorClock | None, touched: torch.Tensor | None
) -> list[_LinkCopy]:
    """Take out of a list the copies that come before `seen`, all or those of touched bytes."""
    done: list[_LinkCopy] = []
    left: list[_LinkCopy] = []
    for copy in copies:
        is_over = seen is None or seen.get(copy.stream_id, 0) >= copy.tick
        is_meant = touched is None or _overlap(copy.host, touched)
        (done if is_over and is_meant else left).append(copy)
    copies[:] = left
    return done


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    first_end = first.data_ptr() + extent_bytes(first)
    second_end = second.data_ptr() + extent_bytes(second)
    return first.data_ptr() < second_end and second.data_ptr() < first_end


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes_of(tensor).contiguous().numpy().data)
