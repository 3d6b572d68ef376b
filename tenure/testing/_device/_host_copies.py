"""What asynchronous copies do to pinned host memory before the host has waited for them.

A copy into pinned memory delivers its bytes when the host waits, or when later device work ordered
after it reads them; until then the destination holds 0xFF bytes, NaN for floats, so that reading
early is loud. A copy out of pinned memory must find its source unchanged when the host waits.
"""

import zlib
from dataclasses import dataclass

import torch

from ._bytes import POISON, bytes_of
from ._pinned import extent_bytes
from ._races import RaceDetector, VectorClock, merge_clocks, stream_name

_ADVICE = "Wait for an event recorded after the copy, or synchronize, before the host touches it."


@dataclass(frozen=True, slots=True)
class _Launch:
    stream_id: int
    tick: int

    def is_before(self, seen: VectorClock) -> bool:
        return seen.get(self.stream_id, 0) >= self.tick


@dataclass(frozen=True, slots=True)
class _Outgoing:
    launch: _Launch
    source: torch.Tensor
    checksum: int


@dataclass(frozen=True, slots=True)
class _Incoming:
    launch: _Launch
    destination: torch.Tensor
    value: torch.Tensor


class HostCopies:
    """The asynchronous copies that the host has not waited for yet."""

    def __init__(self, detector: RaceDetector) -> None:
        self._detector = detector
        self._outgoing: list[_Outgoing] = []
        self._incoming: list[_Incoming] = []

    def send(self, source: torch.Tensor, stream_id: int, seen: VectorClock) -> None:
        """Remember that the newest launch of a stream reads `source`, which is pinned."""
        if self._detector.enabled:
            launch = _Launch(stream_id, seen[stream_id])
            self._outgoing.append(_Outgoing(launch, source.detach(), _checksum(source)))

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
        launch = _Launch(stream_id, seen[stream_id])
        staged = torch.empty_like(destination).copy_(value)
        self._incoming.append(_Incoming(launch, destination.detach(), staged))
        bytes_of(destination).fill_(POISON)

    def expect(self, destination: torch.Tensor, seen: VectorClock) -> None:
        """Poison `destination`, pinned, which a late copy will write."""
        self._finish_outgoing(seen, destination)
        bytes_of(destination).fill_(POISON)

    def deliver(self, seen: VectorClock) -> None:
        """Write the bytes of all copies into the host that come before `seen`."""
        waiting, self._incoming = self._incoming, []
        for copy in waiting:
            if copy.launch.is_before(seen):
                copy.destination.copy_(copy.value)
            else:
                self._incoming.append(copy)

    def settle(self, host_seen: VectorClock) -> None:
        """Finish the copies that the host has now waited for.

        Raises:
            RaceError: the source of one of them has changed since it was launched.
        """
        self.deliver(host_seen)
        self._finish_outgoing(host_seen)

    def settle_all(self) -> None:
        """Finish every copy, as at the end of a program."""
        seen: VectorClock = {}
        waiting: list[_Outgoing | _Incoming] = [*self._outgoing, *self._incoming]
        for copy in waiting:
            merge_clocks(seen, {copy.launch.stream_id: copy.launch.tick})
        self.settle(seen)

    def _finish_outgoing(self, seen: VectorClock, overwritten: torch.Tensor | None = None) -> None:
        """Check the copies out of the host that come before `seen`, of overwritten bytes or all."""
        waiting, self._outgoing = self._outgoing, []
        done: list[_Outgoing] = []
        for copy in waiting:
            concerned = overwritten is None or _overlap(copy.source, overwritten)
            (done if concerned and copy.launch.is_before(seen) else self._outgoing).append(copy)
        for copy in done:
            self._check(copy)

    def _check(self, copy: _Outgoing) -> None:
        if _checksum(copy.source) != copy.checksum:
            self._detector.report(
                f"host overwrite: pinned host memory was written while"
                f" {stream_name(copy.launch.stream_id)} may still copy it to the device. {_ADVICE}"
            )


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    first_end = first.data_ptr() + extent_bytes(first)
    second_end = second.data_ptr() + extent_bytes(second)
    return first.data_ptr() < second_end and second.data_ptr() < first_end


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes_of(tensor).contiguous().numpy().data)
