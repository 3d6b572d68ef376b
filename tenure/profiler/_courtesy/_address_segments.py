"""Which stream and which pool of the allocator an address belongs to.

Memory goes back to the stream that it was allocated on; what is put back later must therefore be
allocated on that stream again. Devices that tell nothing of this have one stream and one pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tenure._torch.device_allocator import is_private, segments_of

from ._staging import on_device

_DEFAULT_STREAM = 0


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
