"""Tensors that have no plain memory to page: subclasses, sparse and empty ones stay on the device.

Invariant: a copy is as new as its original; where one may have changed, the other is copied anew,
after every stream that was shown the copy is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tenure._account import taken
from tenure._registries import NamedTensor
from tenure._torch.quiet import aside_with_subclasses
from tenure._torch.writes import counter_of

from .._link import Link
from .._model import HostTensor, sizes_of_unpaged
from ._page import RESIDENT, in_place_of


class UnpagedTensors:
    """Device copies of host tensors of any kind.

    Args:
        hosts: the tensors.
        link: to the device where the copies go, at once.
    """

    def __init__(self, hosts: list[HostTensor], link: Link) -> None:
        self._link = link
        self._streams: dict[HostTensor, dict[int, Any]] = {host: {} for host in hosts}
        self._copies = {host: self._copy(host) for host in hosts}
        self._versions = {host: self._versions_of(host) for host in hosts}

    @property
    def n_bytes(self) -> int:
        """What the copies take on the device."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each of their blocks."""
        return [n_bytes for host in self._copies for n_bytes in sizes_of_unpaged(host.tensor)]

    def shown(self, host: HostTensor) -> Tensor:
        """The copy that stands for a host tensor, for the current stream."""
        if host.touched or self._versions[host][0] != host.version:
            # The old copy's memory is anybody's when it is let go.
            self._await_uses(host)
            self._copies[host] = self._copy(host)
            self._versions[host] = self._versions_of(host)
        stream = self._link.current()
        self._streams[host][stream.stream_id] = stream
        return self._copies[host]

    def save(self) -> None:
        """Write what has changed on the device back to the host."""
        for host, copy in self._copies.items():
            if counter_of(copy) != self._versions[host][1]:
                self._await_uses(host)
                with aside_with_subclasses():
                    host.tensor.copy_(copy)
                self._versions[host] = self._versions_of(host)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The copies."""
        for host, copy in list(self._copies.items()):
            yield NamedTensor(copy, host.name, RESIDENT)

    def close(self) -> None:
        """Let go of the copies."""
        self._copies.clear()

    def _await_uses(self, host: HostTensor) -> None:
        """Stop the host until all streams that were shown a copy have done what they were given."""
        # Synchronization strategy: these copies are few and stay, so their uses have no events; the
        # host waits for all that the streams were given. Without that, the allocator would hand the
        # memory of the old copy out while a kernel on a side stream still reads it. See
        # test_streams.
        for stream in self._streams[host].values():
            self._link.let_host(self._link.mark(stream))
        self._streams[host].clear()

    def _copy(self, host: HostTensor) -> Tensor:
        host.touched = False
        with aside_with_subclasses():
            # A copy of a tensor that is there already would be the same object
            copy = taken(lambda: host.tensor.detach().to(self._link.device, copy=True), RESIDENT)
            return in_place_of(host.tensor, copy)

    def _versions_of(self, host: HostTensor) -> tuple[int, int]:
        return host.version, counter_of(self._copies[host])
