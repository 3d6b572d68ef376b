"""Bytes of whole storages from a device to the host and back, to the stream that they came from.

Two small pinned buffers take turns, so that the link runs at its full speed while nothing but
these is pinned; the host memory itself stays pageable. When a function here returns, every byte
has arrived.

Memory goes back to the stream that it was allocated on; what is put back later must therefore be
allocated on that stream again. Devices that tell nothing of this have one stream and one pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from tenure._torch.device_allocator import is_private, segments_of
from tenure._torch.quiet import quietly

# Large enough for the full speed of the link, small enough to be pinned anywhere: pinned memory is
# lost to all other processes.
_BUFFER_BYTES = 32 * 2**20
_N_BUFFERS = 2

Load = tuple[UntypedStorage, Tensor]
"""A storage of the device, and uint8[n_bytes] in host memory for it."""

_DEFAULT_STREAM = 0


class _Piece(NamedTuple):
    """Parts of equal length on the device and on the host, and where the part has its place."""

    device: Tensor
    host: Tensor
    start: int

    def within(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.host.numel()]


def host_bytes(n_bytes: int) -> Tensor:
    """uint8[n_bytes] of host memory, which no mode and no scope of the program sees.

    Raises:
        RuntimeError: there is none.
    """
    with quietly(), torch.inference_mode(False):
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")


def to_host(loads: list[Load], device: torch.device) -> None:
    """Copy storages of one device into host memory, after all work that the device has."""
    with _undisturbed(device) as module:
        buffers = _buffers(loads, device)
        if not buffers:
            for storage, host in loads:
                host.copy_(_bytes_of(storage))
            return
        waiting: deque[tuple[Any, list[_Piece], Tensor]] = deque()
        for number, batch in enumerate(_batches(loads, buffers[0].numel())):
            # Synchronization strategy: a buffer is written again only after the host has taken its
            # bytes, and the host takes them only after the event behind the copy into it. Else
            # bytes of two storages mix.
            if len(waiting) == _N_BUFFERS:
                _unload(*waiting.popleft())
            buffer = buffers[number % _N_BUFFERS]
            for piece in batch:
                piece.within(buffer).copy_(piece.device, non_blocking=True)
            waiting.append((_recorded(module), batch, buffer))
        while waiting:
            _unload(*waiting.popleft())


def to_device(loads: list[Load], device: torch.device) -> None:
    """Copy host memory into storages of one device."""
    with _undisturbed(device) as module:
        buffers = _buffers(loads, device)
        if not buffers:
            for storage, host in loads:
                _bytes_of(storage).copy_(host)
            return
        busy: dict[int, Any] = {}
        for number, batch in enumerate(_batches(loads, buffers[0].numel())):
            turn = number % _N_BUFFERS
            # The other way round: the host may write to a buffer once the copy out of it is done.
            if turn in busy:
                busy[turn].synchronize()
            for piece in batch:
                part = piece.within(buffers[turn])
                piece.device.copy_(part.copy_(piece.host), non_blocking=True)
            busy[turn] = _recorded(module)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[Any]:
    """Begin after, and end before, all other work of the device; no mode sees what happens."""
    module: Any = torch.get_device_module(device)
    with (
        quietly(),
        torch.inference_mode(False),
        torch.no_grad(),
        on_device(device),
    ):
        module.synchronize()
        try:
            yield module
        finally:
            module.synchronize()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a device is the current one of its kind."""
    module: Any = torch.get_device_module(device)
    context: AbstractContextManager[Any] = (
        module.device(device.index) if hasattr(module, "device") else nullcontext()
    )
    return context


def _buffers(loads: list[Load], device: torch.device) -> list[Tensor]:
    """Pinned buffers, no larger than they need to be; none where nothing can be pinned."""
    module: Any = torch.get_device_module(device)
    n_bytes = min(_BUFFER_BYTES, sum(host.numel() for _, host in loads))
    if not hasattr(module, "Event"):
        return []
    plain = [host_bytes(n_bytes) for _ in range(_N_BUFFERS)]
    try:
        # Page-locked memory can run out; then the bytes go the slow way.
        return [buffer.pin_memory() for buffer in plain]
    # no pinned memory there, or none left
    except (RuntimeError, NotImplementedError):
        return []


def _batches(loads: Iterable[Load], capacity: int) -> Iterator[list[_Piece]]:
    """All bytes, in pieces that fill one buffer after the other."""
    batch: list[_Piece] = []
    start = 0
    for storage, host in loads:
        source, done = _bytes_of(storage), 0
        # A storage can be larger than a buffer, and a buffer can hold many storages: small ones
        # share a wait.
        while done < host.numel():
            length = min(capacity - start, host.numel() - done)
            part = slice(done, done + length)
            batch.append(_Piece(source[part], host[part], start))
            done, start = done + length, start + length
            if start == capacity:
                yield batch
                batch, start = [], 0
    if batch:
        yield batch


def _recorded(module: Any) -> Any:
    event = module.Event()
    event.record()
    return event


def _unload(event: Any, batch: list[_Piece], buffer: Tensor) -> None:
    event.synchronize()
    for piece in batch:
        piece.host.copy_(piece.within(buffer))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    whole: Tensor = empty.set_(storage)
    return whole


# --- which stream an address belongs to


class Segment(NamedTuple):
    """A range of addresses of one allocation of the allocator.

    Attributes:
        low: the first address.
        high: the address behind the last.
        stream: the number of the stream that may use freed memory of it again.
        is_private: it belongs to a pool of its own, as that of a CUDA graph.
    """

    low: int
    high: int
    stream: int
    is_private: bool


# Where the allocator tells nothing of an address: memory from any stream will do.
_UNKNOWN = Segment(0, 0, _DEFAULT_STREAM, is_private=False)


class Segments:
    """The segments of a device as they are now.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        found = [_segment(entry) for entry in _told(device)]
        self._segments = sorted(found)
        self._lows = [segment.low for segment in self._segments]

    def at(self, address: int) -> Segment:
        """The segment of an address; one of the default stream where none is known."""
        index = bisect_right(self._lows, address) - 1
        if index >= 0 and address < self._segments[index].high:
            return self._segments[index]
        return _UNKNOWN


@contextmanager
def on_stream(device: torch.device, segment: Segment) -> Iterator[None]:
    """A context in which memory of the device is allocated for the stream of a segment.

    The device is current around it: ``torch.cuda.stream`` leaves by turning to the device that was
    current before, which makes a context there.
    """
    # There is no stream to turn to, and turning would make a context on the device.
    if segment is _UNKNOWN:
        yield
        return
    module: Any = torch.get_device_module(device)
    # Number 0 is what CUDA calls the default stream, and no stream that ExternalStream takes.
    if segment.stream == _DEFAULT_STREAM:
        stream = module.default_stream(device)
    else:
        stream = module.ExternalStream(segment.stream, device=device)
    with on_device(device), module.stream(stream):
        yield


def _told(device: torch.device) -> list[dict[str, Any]]:
    """What the allocator tells, where memory can be allocated for a stream that it names."""
    module: Any = torch.get_device_module(device)
    # A stream that can't be named again can't be allocated for, so what it owned is not asked.
    return segments_of(module, device) if hasattr(module, "ExternalStream") else []


def _segment(entry: dict[str, Any]) -> Segment:
    low = entry["address"]
    return Segment(low, low + entry["total_size"], entry["stream"], is_private(entry))
