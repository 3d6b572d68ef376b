"""What a forward is shown of a tensor that is made of others: one that is made of their copies.

Its class writes the parts below autograd, which counts a write of the whole alone: that is passed
on to the parts here, whose pages go by their own counts.

Invariant: it is the same object as long as anything has it, and at most until the next `settle()`
otherwise, or the bytes of its parts would never be free.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tenure._torch.compiler import never_compiled
from tenure._torch.quiet import aside_with_subclasses
from tenure._torch.storages import is_held
from tenure._torch.writes import counter_of, set_version

from .._model import HostTensor, made_around, parts_of
from ._page import in_place_of


class Composed:
    """Those of one model.

    Args:
        device: where the copies are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[HostTensor, Tensor] = {}
        self._n_writes: dict[HostTensor, int] = {}

    @never_compiled
    def of(self, host: HostTensor, shown: dict[int, Tensor]) -> Tensor:
        """Return the tensor that replaces a host tensor.

        Args:
            host: the tensor.
            shown: what stands for each of its parts, by the ``id`` of that.
        """
        made = self._made.get(host)
        if made is None:
            with aside_with_subclasses():
                made = self._made[host] = self._make(host.tensor, shown)
            self._n_writes[host] = counter_of(made)
        return made

    def settle(self) -> None:
        """Pass writes on to the parts, and let go of what nothing else has."""
        for host in list(self._made):
            n_writes = counter_of(self._made[host])
            if n_writes != self._n_writes[host]:
                self._n_writes[host] = n_writes
                for part in parts_of(self._made[host]).values():
                    set_version(part, counter_of(part) + 1)
            if not is_held(self._made, host):
                del self._made[host], self._n_writes[host]

    def _make(self, original: Tensor, shown: dict[int, Tensor]) -> Tensor:
        def instead(part: Tensor) -> Tensor:
            # An empty one has no page, nor has one that the program has put there since.
            found = shown.get(id(part))
            return part.to(self._device) if found is None else found

        made = made_around(original, instead)
        if isinstance(original, nn.Parameter):
            # As a parameter is made of a subclass, but for a detached copy, around detached parts.
            vars(made)["_is_param"] = True
        return in_place_of(original, made)
