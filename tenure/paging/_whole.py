"""Tensors that have no plain memory to page: subclasses, sparse and empty ones stay on the device.

Invariant: a copy is as new as its original; where one may have changed, the other is copied anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tenure._account import taken
from tenure._named_tensors import NamedTensor

from ._page import RESIDENT, in_place_of
from ._table import HostTensor, n_bytes_of_whole
from ._torch_aside import aside_with_subclasses


class WholeTensors:
    """Device copies of host tensors of any kind.

    Args:
        hosts: the tensors.
        device: where the copies go, at once.
    """

    def __init__(self, hosts: list[HostTensor], device: torch.device) -> None:
        self._device = device
        self._copies = {host: self._copy(host) for host in hosts}
        self._versions = {host: self._versions_of(host) for host in hosts}

    @property
    def n_bytes(self) -> int:
        """What the copies take on the device."""
        return sum(n_bytes_of_whole(host.tensor) for host in self._copies)

    def shown(self, host: HostTensor) -> Tensor:
        """The copy that stands for a host tensor."""
        if host.touched or self._versions[host][0] != host.version:
            self._copies[host] = self._copy(host)
            self._versions[host] = self._versions_of(host)
        return self._copies[host]

    def save(self) -> None:
        """Write what has changed on the device back to the host."""
        for host, copy in self._copies.items():
            if copy._version != self._versions[host][1]:
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

    def _copy(self, host: HostTensor) -> Tensor:
        host.touched = False
        with aside_with_subclasses():
            # a copy of a tensor that is there already would be the same object
            copy = taken(lambda: host.tensor.detach().to(self._device, copy=True), RESIDENT)
            return in_place_of(host.tensor, copy)

    def _versions_of(self, host: HostTensor) -> tuple[int, int]:
        return host.version, self._copies[host]._version
