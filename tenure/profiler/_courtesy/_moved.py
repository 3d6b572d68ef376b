"""One storage whose bytes are in host memory, from the moment it is emptied to its return.

The storage stays the same object, so whatever shares it (views, ties, graphs, versions) needs no
change. Its bytes exist at any moment on the device, in host memory, or on both, never on neither,
unless the storage itself has died.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from tenure._heap import type_name
from tenure._text import format_bytes
from tenure._torch import trap

from ._address_segments import Segment, on_stream
from ._away import guard, heal, refuse_backward
from ._inventory import Holding

if TYPE_CHECKING:
    from ._courtesy import Courtesy

_TRAP = "its bytes are in host memory: leave the block of tenure's Courtesy, or call its restore()."


class Moved:
    """The bytes of a storage, its tensors and its graphs while they are away.

    Args:
        courtesy: who moved it.
        holding: the storage and all that shares it.
        host: uint8[n_bytes], the bytes of the storage.
        segment: where they lay.

    Attributes:
        n_bytes: how many bytes.
        device: where they belong.
        host: the bytes, or None when they are not needed any more.
    """

    def __init__(
        self, courtesy: Courtesy, holding: Holding, host: Tensor, segment: Segment
    ) -> None:
        self.courtesy = courtesy
        self.n_bytes = host.numel()
        self.device = holding.storage.device
        self.host: Tensor | None = host
        self.n_tensors = len(holding.tensors)
        self._segment = segment
        self._hooks: list[Any] = []
        self._handles = [weakref.ref(handle) for handle in holding.handles]
        self._storage = weakref.ref(holding.storage, partial(_let_go, weakref.ref(self)))

    @property
    def text(self) -> str:
        """How many bytes of which device."""
        return f"{format_bytes(self.n_bytes)} on {self.device}"

    @property
    def storage(self) -> UntypedStorage | None:
        """The storage, or None when it has died."""
        return self._storage()

    @property
    def is_away(self) -> bool:
        """Whether the bytes in host memory are the ones that count."""
        return self.host is not None

    def leave(self, holding: Holding) -> None:
        """Make every use loud, then let go of the device memory."""
        for handle in holding.handles:
            guard(handle, self)
        for node in holding.nodes.values():
            refusal = partial(_refuse, weakref.ref(self), type_name(type(node)))
            self._hooks.append(node.register_prehook(refusal))
        holding.storage.resize_(0)
        trap.arm(holding.storage, f"{self.text}: {_TRAP}")

    def allocate(self) -> UntypedStorage | None:
        """Give the storage its memory back, whose bytes are undefined yet; None if it has died.

        Raises:
            RuntimeError: there is no memory for it, and it stays as it was.
        """
        storage = self.storage
        if storage is not None and storage.nbytes() != self.n_bytes:
            trap.disarm(storage)
            try:
                with on_stream(self.device, self._segment):
                    storage.resize_(self.n_bytes)
            except BaseException:
                trap.arm(storage, f"{self.text}: {_TRAP}")
                raise
        return storage

    def come_back(self) -> None:
        """Let the tensors and graphs be used again; the storage has its bytes."""
        self.host = None
        for hook in self._hooks:
            hook.remove()
        for reference in self._handles:
            handle = reference()
            if handle is not None:
                heal(handle)


def _let_go(reference: weakref.ref[Moved], _: Any) -> None:
    """The storage has died, and nobody needs its bytes any more."""
    moved = reference()
    if moved is not None:
        moved.host = None
        moved.courtesy.forget(moved)


def _refuse(reference: weakref.ref[Moved], node: str, _: tuple[torch.Tensor, ...]) -> None:
    moved = reference()
    if moved is not None and moved.is_away:
        refuse_backward(node, moved)
