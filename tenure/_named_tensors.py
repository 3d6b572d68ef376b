"""Who names tensors that no module and no optimizer has: pagers and other keepers of memory.

Invariant: being registered keeps nothing alive, and what names tensors keeps them itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import Tensor, UntypedStorage, nn


class NamedTensor(NamedTuple):
    """A tensor with a storage of its own, and what a report of memory calls it.

    Attributes:
        tensor: it shows all bytes of its storage.
        name: what it is to the model that it serves.
        category: what its bytes count as, beside parameters, buffers and so on.
        inside: other storages whose bytes are counted with these, or with several such as these:
            what lies in them, and what they lie in.
    """

    tensor: Tensor
    name: str
    category: str
    inside: tuple[UntypedStorage, ...] = ()


class TensorNamer(Protocol):
    """What keeps memory for a model, and can say what for."""

    def served_model(self) -> nn.Module | None:
        """The model that the memory is for; None when that is gone."""
        ...

    def named_tensors(self) -> Iterable[NamedTensor]:
        """The tensors that it keeps now. Called on any thread, and never inside an operation."""
        ...


_lock = threading.Lock()
# a dictionary, for its order: the first comes first
_registered: weakref.WeakKeyDictionary[TensorNamer, None] = weakref.WeakKeyDictionary()


def register_namer(namer: TensorNamer) -> None:
    """From now on, and as long as it lives, let its tensors be named in reports."""
    with _lock:
        _registered[namer] = None


def unregister_namer(namer: TensorNamer) -> None:
    """Name its tensors no more; one that is not registered is ignored."""
    with _lock:
        _registered.pop(namer, None)


def tensor_namers() -> list[TensorNamer]:
    """All that are registered and alive, the first first."""
    with _lock:
        return list(_registered)
