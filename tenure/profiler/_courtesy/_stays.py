"""What can leave a device, and why the rest has to stay.

Bytes at another address are not the same to everyone: whatever is in doubt stays, with a reason
that is a sentence about one storage or about its whole device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tenure._graph_capture import kind_of_live_graph
from tenure._heap import find_holders
from tenure._text import describe_tensor, format_bytes
from tenure._torch.device_allocator import is_private, segments_of
from tenure._torch.storages import key_of, shared_keys

from ._away import can_leave
from ._inventory import Holding
from ._report import Stay

# the largest are named
_NAMED = 8
_NAMELESS = frozenset({"unknown", "cycle"})
_Reason = Callable[[Holding], str]


def split(here: list[Holding]) -> tuple[list[Holding], list[Stay]]:
    """The holdings that can leave, and what stays, the largest first."""
    reasons = {device: _reasons_on(device) for device in {held.storage.device for held in here}}
    going: list[Holding] = []
    staying: list[tuple[Holding, str]] = []
    for held in here:
        told = (reason(held) for reason in reasons[held.storage.device])
        why = next(filter(None, told), "")
        if why:
            staying.append((held, why))
        else:
            going.append(held)
    staying.sort(key=lambda pair: -pair[0].storage.nbytes())
    names = _names([held for held, _ in staying], here)
    stays = [
        Stay(_text_of(held), held.storage.nbytes(), why, names.get(id(held), ""))
        for held, why in staying
    ]
    return going, stays


def _reasons_on(device: torch.device) -> tuple[_Reason, ...]:
    """Why a storage of a device has to stay; each is empty for one that can leave."""
    graph = kind_of_live_graph(device)
    of_device = f"a live {graph} replays on the addresses it was captured with" if graph else ""
    if not _can_resize(device):
        of_device = f"torch can't empty a storage of {device}, and fill it again, in place"
    module: Any = torch.get_device_module(device)
    # A stream that can't be named can't be allocated for, so there its memory has but one.
    segments = segments_of(module, device) if hasattr(module, "ExternalStream") else []
    apart = [entry for entry in segments if is_private(entry) or entry["stream"]]
    shared = shared_keys()

    def of_memory(held: Holding) -> str:
        storage = held.storage
        # From a file, from NumPy, from another library: it can't be freed, so it can't be lent.
        if not storage.resizable():
            return "its memory belongs to somebody else than torch"
        if key_of(storage) in shared:
            return "it is shared with another process"
        address = storage.data_ptr()
        for entry in apart:
            if 0 <= address - entry["address"] < entry["total_size"]:
                return (
                    "it lies in a memory pool of its own, whose addresses may be in use"
                    if is_private(entry)
                    else "it was allocated on a side stream, to which its memory has to return"
                )
        return ""

    return lambda _: of_device, of_memory, _of_owners


def _can_resize(device: torch.device) -> bool:
    """Whether torch resizes storages of this type of device: not of all, such as MPS."""
    # Tried on an empty one: a list of backends would be out of date.
    trial = torch.empty(0, device=device).untyped_storage()
    try:
        trial.resize_(0)
    except RuntimeError:
        return False
    return True


def _of_owners(held: Holding) -> str:
    if held.n_unseen:
        return (
            "something in C++ that can't be seen uses it too, such as another library by DLPack, "
            "an operation that is running, or the graph of a change to a view"
        )
    if held.n_sparse:
        return "a sparse tensor is made of it"
    # Its class can't be exchanged for one that refuses, and a silent read of freed bytes is worse
    # than memory that stays; see test_a_subclass_with_slots_stays.
    blunt = [type(t).__name__ for t in held.tensors.values() if not can_leave(t)]
    return f"a {blunt[0]} has slots, so its use meanwhile could not be refused" if blunt else ""


def _names(staying: list[Holding], here: list[Holding]) -> dict[int, str]:
    """By holding, who has its first tensor, in the words of leak reports."""
    largest = [held for held in staying[:_NAMED] if held.tensors]
    handles = [next(iter(held.tensors.values())) for held in largest]
    ours = (handles, *(held.tensors for held in here))
    found = find_holders(handles, ignore=ours) if handles else []
    named = [[h.chain for h in each if h.named and h.kind not in _NAMELESS] for each in found]
    return {id(held): next(iter(chains), "") for held, chains in zip(largest, named, strict=True)}


def _text_of(held: Holding) -> str:
    for t in held.tensors.values():
        return describe_tensor(t)
    return f"a storage of {format_bytes(held.storage.nbytes())} on {held.storage.device}"
