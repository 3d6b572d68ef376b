"""What lies in device memory: every storage, the tensors that share it, the nodes that saved them.

Every owner of a storage is counted, in Python and in C++, so that memory which something unseen
holds as well (another library by DLPack, a pass that is running) is told apart. Nothing is changed,
no unpack hook runs, and of a subclass nothing but its ``__tensor_flatten__``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._devices import NO_ACCELERATOR
from tenure._heap import Image, cpp_uses, gradient_of, read
from tenure._storages import storages_of
from tenure._torch.quiet import quietly
from tenure._torch.storages import key_of, owners_of_storage

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
        image = Image()
        graphs, _ = image.walk()
        savers: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        for saved in graphs.saved:
            savers[saved.tensor][saved.node] = graphs.nodes[saved.node]
        uses = Counter({id(entry.found): entry.n_saved for entry in graphs.tensors})
        tensors = _closed([*image.tensors, *(entry.found for entry in graphs.tensors)], uses)
        by_key: dict[int, Holding] = {}
        for storage in image.storages:
            _enter(by_key, storage)
        for t in tensors.values():
            _add(by_key, t, savers.get(id(t), {}))
        for holding in by_key.values():
            holding.n_unseen = _unseen_owners(holding, uses)
        return list(by_key.values())


def _closed(waiting: list[Tensor], uses: Counter[int]) -> dict[int, Tensor]:
    """These and their bases and gradients, which C++ alone may have; each of these is a use."""
    tensors: dict[int, Tensor] = {}
    while waiting:
        t = waiting.pop()
        if id(t) in tensors:
            continue
        tensors[id(t)] = t
        base = read(t, "_base")
        for held in (base, gradient_of(t)):
            if held is not None:
                uses[id(held)] += 1
                waiting.append(held)
        # Its second reference to the base is one of those that C++ counts.
        if base is not None and _is_twofold_view(t, base):
            uses[id(base)] += 1
    return tensors


def _add(by_key: dict[int, Holding], t: Tensor, nodes: dict[int, Any]) -> None:
    is_dense = read(t, "layout") is torch.strided
    for storage in _storages_of(t):
        holding = _enter(by_key, storage)
        if holding is not None:
            holding.nodes |= nodes
            if is_dense:
                holding.tensors[id(t)] = t
            else:
                holding.n_sparse += 1


def _unseen_owners(holding: Holding, uses: Counter[int]) -> int:
    """Owners of the storage, and of its tensors, that the image does not show."""
    # A tensor that more of C++ owns than graphs, views and gradients explain is in use by
    # something that can't be told to wait; see test_an_owner_that_cannot_be_seen_is_counted.
    of_tensors = sum(cpp_uses(t) - _ALONE - uses[key] for key, t in holding.tensors.items())
    n_seen = len(holding.tensors) + holding.n_sparse
    return max(0, owners_of_storage(holding.storage) - n_seen) + max(0, of_tensors)


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
