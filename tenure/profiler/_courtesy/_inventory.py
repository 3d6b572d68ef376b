"""What lies in device memory: every storage, the tensors that share it, the nodes that saved them.

Every owner of a storage is counted, in Python and in C++, so that memory which something unseen
holds as well (another library by DLPack, a pass that is running) is told apart. Nothing is changed,
no unpack hook runs, and of a subclass nothing but its ``__tensor_flatten__``.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._devices import NO_ACCELERATOR
from tenure._heap import (
    cpp_uses,
    gradient_of,
    instances,
    is_kind,
    is_node_class,
    judged,
    read,
    slots_of_node,
    tracked_objects,
    walk_nodes,
)
from tenure._storages import storages_of
from tenure._torch.autograd import wraps_saved_tensors
from tenure._torch.quiet import quietly
from tenure._torch.storages import key_of, owners_of_storage

_NODE = "node"
# objects whose references are looked at together
_CHUNK = 1 << 16
# what cpp_uses() says of a tensor that only its handle owns
_ALONE = 1


@dataclass(slots=True, eq=False)
class Holding:
    """One storage of a device, held strongly while this object lives.

    Attributes:
        storage: the storage.
        tensors: the tensors that lie in it, by identity.
        nodes: nodes of autograd's graphs that saved one of the tensors, by identity.
        n_sparse: how many sparse tensors are made of it.
        n_unseen: owners that are none of these.
    """

    storage: UntypedStorage
    tensors: dict[int, Tensor] = field(default_factory=dict)
    nodes: dict[int, Any] = field(default_factory=dict)
    n_sparse: int = 0
    n_unseen: int = 0


def take_inventory() -> list[Holding]:
    """The storages that take memory of accelerators, in the order in which they were found."""
    with quietly():
        found = _Found()
        holdings = found.holdings()
        for holding in holdings:
            holding.n_unseen = found.unseen_owners(holding)
    return holdings


class _Found:
    """All tensors, reached from the heap through views, gradients and graphs."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.storages: list[UntypedStorage] = []
        self.savers: dict[int, dict[int, Any]] = {}
        self._nodes: dict[int, Any] = {}
        self._uses: Counter[int] = Counter()
        self._open: list[Tensor] = []
        # Gradients, bases and saved tensors can be C++'s alone: from the heap they are reached step
        # by step.
        self._look_at(tracked_objects())
        while self._open:
            self._expand(self._open.pop())

    def _look_at(self, heap: list[Any]) -> None:
        """Begin with what Python has: a node, too, may be held without any tensor."""
        for found, kind in judged(heap, _kind_of):
            if kind is Tensor:
                self._open.append(found)
            elif kind is UntypedStorage:
                self.storages.append(found)
            elif kind is _NODE:
                self._add_graph(found)
        for start in range(0, len(heap), _CHUNK):
            # the inputs of a checkpoint are saved outside of any node
            held_together = gc.get_referents(*heap[start : start + _CHUNK])
            for held in instances(held_together, wraps_saved_tensors):
                if is_kind(type(held.data), Tensor):
                    self._add_use(held.data)

    def holdings(self) -> list[Holding]:
        """One holding for each storage that takes memory of an accelerator."""
        by_key: dict[int, Holding] = {}
        for storage in self.storages:
            _enter(by_key, storage)
        for key, t in self.tensors.items():
            is_dense = read(t, "layout") is torch.strided
            for storage in _storages_of(t):
                holding = _enter(by_key, storage)
                if holding is None:
                    continue
                if is_dense:
                    holding.tensors[key] = t
                else:
                    holding.n_sparse += 1
                holding.nodes |= self.savers.get(key, {})
        return list(by_key.values())

    def unseen_owners(self, holding: Holding) -> int:
        """Owners of the storage, and of its tensors, that this search has not met."""
        n_seen = len(holding.tensors) + holding.n_sparse
        # A tensor that more of C++ owns than graphs, views and gradients explain is in use by
        # something that can't be told to wait; see test_an_owner_that_cannot_be_seen_is_counted.
        of_tensors = sum(
            cpp_uses(t) - _ALONE - self._uses[key] for key, t in holding.tensors.items()
        )
        return max(0, owners_of_storage(holding.storage) - n_seen) + max(0, of_tensors)

    def _expand(self, t: Tensor) -> None:
        if id(t) in self.tensors:
            return
        self.tensors[id(t)] = t
        base = read(t, "_base")
        self._add_use(base)
        # Its second reference to the base is one of those that C++ counts.
        if base is not None and _is_twofold_view(t, base):
            self._uses[id(base)] += 1
        self._add_use(gradient_of(t))
        self._add_graph(read(t, "grad_fn"))

    def _add_graph(self, root: Any) -> None:
        for node in walk_nodes([root], self._nodes) if root is not None else ():
            for slot in slots_of_node(node):
                # what a hook has packed is Python's, and found there
                if slot.unpack_hook is None and is_kind(type(slot.data), Tensor):
                    self._add_use(slot.data)
                    self.savers.setdefault(id(slot.data), {})[id(node)] = node

    def _add_use(self, t: Tensor | None) -> None:
        if t is not None:
            self._uses[id(t)] += 1
            self._open.append(t)


def _enter(by_key: dict[int, Holding], storage: UntypedStorage) -> Holding | None:
    # memory of the host never moves, and meta tensors have none
    if storage.device.type in NO_ACCELERATOR or storage.nbytes() == 0:
        return None
    return by_key.setdefault(key_of(storage), Holding(storage))


def _storages_of(t: Tensor) -> Iterable[UntypedStorage]:
    try:
        return storages_of(t)
    # opaque tensors raise errors of many types here
    except Exception:
        return ()


def _is_twofold_view(t: Tensor, base: Tensor) -> bool:
    """Whether a view holds its base twice, for backward and forward differentiation apart.

    Source: ``shared_view_info_`` of ``torch/csrc/autograd/variable.h``.
    """
    try:
        is_lazy = torch.is_conj(t) != torch.is_conj(base) or torch.is_neg(t) != torch.is_neg(base)
        return is_lazy or torch.is_complex(t) != torch.is_complex(base)
    # functorch's wrappers raise errors of many types here
    except Exception:
        return False


def _kind_of(cls: type) -> object:
    """What the instances of a class are to the search."""
    if is_kind(cls, Tensor):
        return Tensor
    if is_kind(cls, UntypedStorage):
        return UntypedStorage
    return _NODE if is_node_class(cls) else None
