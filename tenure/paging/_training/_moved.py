"""What a graph has of tensors whose bytes may be away: which bytes, where they are, in which form.

Invariant: whoever keeps a `Moved` keeps its bytes; with the last one they go, and somebody is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._activation_memory import HostBytes


class MovedBytes:
    """The bytes of a storage, or a part of it, and where they are.

    Attributes:
        n_bytes: how many.
        start: the first one's place in the storage that was saved.
        serial: the higher, the later it was saved, and the sooner it is needed.
        on_host: the host's; they are there from ``arrived`` on.
        here: the device's, while they are kept; None if they are away.
        came_back: whether those are a copy, and not what was saved.
        base: the first one's place in the storage of ``here``.
        stream: where they are used.
        pending: the copy from or to them that ``stream`` has not waited for.
        last_read: the last copy of the host's bytes.
        storage: that of ``here``, whoever keeps it.
    """

    __slots__ = (
        "arrived",
        "base",
        "came_back",
        "here",
        "last_read",
        "n_bytes",
        "on_host",
        "pending",
        "serial",
        "start",
        "storage",
        "stream",
    )

    def __init__(
        self, here: Tensor, start: int, n_bytes: int, on_host: HostBytes, stream: Any
    ) -> None:
        self.n_bytes, self.start, self.base = n_bytes, start, start
        self.here: Tensor | None = here
        self.on_host, self.stream = on_host, stream
        self.serial = 0
        self.came_back = False
        self.arrived: Any = None
        self.pending: Any = None
        self.last_read: Any = None
        self.storage = weakref.ref(here.untyped_storage())


class Away:
    """Some bytes, for as long as a node keeps one of the tensors over them.

    Attributes:
        bytes: they.
        writes: counts writes to these tensors, which all have one counter.
        n_writes: how many there were.
        n_saved: how many nodes keep one of the tensors.
        n_given: how many have had theirs.
    """

    __slots__ = (
        "__weakref__",
        "_forget",
        "bytes",
        "n_given",
        "n_saved",
        "n_writes",
        "writes",
    )

    def __init__(
        self,
        saved: MovedBytes,
        writes: Tensor,
        n_writes: int | None,
        forget: Callable[[MovedBytes], None],
    ) -> None:
        self.bytes, self._forget = saved, forget
        self.writes, self.n_writes = writes, n_writes
        self.n_saved = self.n_given = 0

    def __del__(self) -> None:
        self._forget(self.bytes)


class Moved(NamedTuple):
    """A tensor that was saved, over bytes that may be away.

    Attributes:
        away: the bytes.
        dtype: of it.
        form: its offset in its storage, in elements, its size and its strides.
    """

    away: Away
    dtype: torch.dtype
    form: tuple[int, torch.Size, tuple[int, ...]]
