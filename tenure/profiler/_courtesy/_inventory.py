"""What lies in device memory: every storage, the tensors that share it, the nodes that saved them.

Every owner of a storage is counted, in Python and in C++, so that memory which something unseen
holds as well (another library by DLPack, a pass that is running) is told apart, and stays. Nothing
is changed, no unpack hook runs, and of a subclass nothing but its ``__tensor_flatten__``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._devices import NO_ACCELERATOR
from tenure._heap import Image, cpp_uses, gradient_of, read
from tenure._storages import is_hollow, storages_of
from tenure._text import describe_tensor, format_bytes
from tenure._torch.device_allocator import is_private, segments_of
from tenure._torch.quiet import quietly
from tenure._torch.storages import key_of, owners_of_storage, shared_keys

# what cpp_uses() says of a tensor that only its handle owns
_ALONE = 1


@dataclass(slots=True, eq=False)
class Holding:
    """One storage of a device, held strongly while this object lives.

    Attributes:
        storage: the storage.
        tensors: the tensors that lie in it, by identity.
        nodes: nodes of autograd's graphs that saved one of the tensors, by identity.
        n_unseen: owners that are none of these.
    """

    storage: UntypedStorage
    tensors: dict[int, Tensor] = field(default_factory=dict)
    nodes: dict[int, Any] = field(default_factory=dict)
    n_unseen: int = 0


def take_inventory() -> list[Holding]:
    """Return the storages in the memory of accelerators, in the order of the search."""
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
    """Return these with their bases and gradients, each of which is a use, maybe only in C++."""
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
    return tensors


def _add(by_key: dict[int, Holding], t: Tensor, nodes: dict[int, Any]) -> None:
    try:
        storages = storages_of(t)
    # opaque tensors raise errors of many types here
    except Exception:
        return
    for storage in storages:
        holding = _enter(by_key, storage)
        if holding is not None:
            holding.nodes |= nodes
            # the class of another one can't be exchanged: it stays unseen
            if read(t, "layout") is torch.strided:
                holding.tensors[id(t)] = t


def _unseen_owners(holding: Holding, uses: Counter[int]) -> int:
    """Return how many owners of the storage, and of its tensors, the image does not show."""
    # A tensor that more of C++ owns than graphs, views and gradients explain is in use by
    # something that can't be told to wait.
    of_tensors = sum(cpp_uses(t) - _ALONE - uses[key] for key, t in holding.tensors.items())
    n_seen = len(holding.tensors)
    return max(0, owners_of_storage(holding.storage) - n_seen) + max(0, of_tensors)


def _enter(by_key: dict[int, Holding], storage: UntypedStorage) -> Holding | None:
    # memory of the host never moves, and meta tensors and wrappers have none
    if storage.device.type in NO_ACCELERATOR or storage.nbytes() == 0 or is_hollow(storage):
        return None
    return by_key.setdefault(key_of(storage), Holding(storage))


# --- what stays


@dataclass(frozen=True, slots=True)
class Stay:
    """Memory that stayed on its device.

    Attributes:
        text: the tensor, as ``float32[4, 4] on cuda:0, 64 B``; without one, the storage.
        n_bytes: bytes of the storage.
        reason: why it can't be moved.
    """

    text: str
    n_bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.text}: {self.reason}"


def split(here: list[Holding]) -> tuple[list[Holding], list[Stay]]:
    """Return the holdings that can leave, and what stays, the largest first."""
    shared = shared_keys()
    apart = {device: _segments_apart(device) for device in {held.storage.device for held in here}}
    going: list[Holding] = []
    stays: list[Stay] = []
    for held in here:
        n_bytes, device = held.storage.nbytes(), held.storage.device
        why = _reason(held, shared, apart[device])
        if why:
            texts = [describe_tensor(t) for t in held.tensors.values()]
            texts += [f"a storage of {format_bytes(n_bytes)} on {device}"]
            stays.append(Stay(texts[0], n_bytes, why))
        else:
            going.append(held)
    return going, sorted(stays, key=lambda stay: -stay.n_bytes)


def _segments_apart(device: torch.device) -> list[dict[str, Any]]:
    module: Any = torch.get_device_module(device)
    # A stream that can't be named can't be allocated for, so there its memory has but one.
    segments = segments_of(module, device) if hasattr(module, "ExternalStream") else []
    return [entry for entry in segments if is_private(entry) or entry["stream"]]


def _reason(held: Holding, shared: frozenset[int], apart: list[dict[str, Any]]) -> str:
    """Return why a storage has to stay; empty for one that can leave."""
    storage = held.storage
    # From a file, from NumPy, from another library: it can't be freed, so it can't be lent.
    if not storage.resizable():
        return "its memory belongs to somebody else than torch"
    if key_of(storage) in shared:
        return "it is shared with another process"
    address = storage.data_ptr()
    if any(0 <= address - entry["address"] < entry["total_size"] for entry in apart):
        return (
            "it was allocated on a side stream, or in a memory pool of its own, to which its "
            "memory has to return"
        )
    if held.n_unseen:
        return (
            "something in C++ that can't be seen uses it too, such as another library by DLPack, "
            "an operation that is running, the graph of a change to a view, or a sparse tensor"
        )
    # Its class can't be exchanged for one that refuses, and a silent read of freed bytes is worse
    # than memory that stays.
    kinds = [type(t) for t in held.tensors.values()]
    blunt = [cls.__name__ for cls in kinds if cls.__basicsize__ != Tensor.__basicsize__]
    return f"a {blunt[0]} has slots, so its use meanwhile could not be refused" if blunt else ""
