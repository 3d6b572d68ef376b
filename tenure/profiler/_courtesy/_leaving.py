"""What can leave, copied to host memory before anything changes; and why the rest has to stay.

Bytes at another address are not the same to everyone: whatever is in doubt stays, with a reason
that is a sentence about one storage or about its whole device.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from tenure._errors import CourtesyError
from tenure._graph_capture import kind_of_live_graph
from tenure._heap import find_holders
from tenure._host_memory import free_host_bytes
from tenure._text import describe_tensor, format_bytes
from tenure._torch.storages import key_of, shared_keys

from . import _staging
from ._away import can_guard
from ._courtesy_report import Stay
from ._inventory import Holding
from ._staging import Segment, Segments

# the largest are named, by the first of their tensors that has a name
_NAMED = 8
_TRIED = 4
_NAMELESS = frozenset({"unknown", "cycle"})


class Ready(NamedTuple):
    """A storage that can go, its bytes in host memory, and where they lay on the device."""

    holding: Holding
    host: Tensor
    segment: Segment


class Leaving(NamedTuple):
    """What is ready to leave one device, and what stays there."""

    ready: list[Ready]
    stays: list[Stay]


def prepare(device: torch.device, holdings: list[Holding]) -> Leaving:
    """Tell what stays of the holdings of one device, and copy the bytes of those that can go.

    Raises:
        CourtesyError: the host has no memory for them.
    """
    segments = Segments(device)
    reasons = _reasons_to_stay(device, segments, holdings)
    going = [held for held, reason in zip(holdings, reasons, strict=True) if not reason]
    staying = [(held, reason) for held, reason in zip(holdings, reasons, strict=True) if reason]
    # All host memory before the first copy: without room for all, nothing has happened.
    loads = list(zip((held.storage for held in going), _host_memory(going, device), strict=True))
    if loads:
        _staging.to_host(loads, device)
    ready = [
        Ready(held, host, segments.at(held.storage.data_ptr()))
        for held, (_, host) in zip(going, loads, strict=True)
    ]
    return Leaving(ready, _stays(staying))


def _reasons_to_stay(
    device: torch.device, segments: Segments, holdings: list[Holding]
) -> list[str]:
    """For each holding of a device a reason to stay; empty for what can be moved."""
    of_device, shared = _reason_of_device(device), shared_keys()
    return [
        of_device or _reason_of_memory(held.storage, segments, shared) or _reason_of_owners(held)
        for held in holdings
    ]


def _reason_of_device(device: torch.device) -> str:
    if not _can_resize(device):
        return f"torch can't empty a storage of {device}, and fill it again, in place"
    graph = kind_of_live_graph(device)
    return "" if graph is None else f"a live {graph} replays on the addresses it was captured with"


def _can_resize(device: torch.device) -> bool:
    """Whether torch resizes storages of this type of device: not of all, such as MPS."""
    # Tried on an empty one: a list of backends would be out of date.
    trial = torch.empty(0, device=device).untyped_storage()
    try:
        trial.resize_(0)
    except RuntimeError:
        return False
    return True


def _reason_of_memory(storage: UntypedStorage, segments: Segments, shared: Collection[int]) -> str:
    # From a file, from NumPy, from another library: it can't be freed, so it can't be lent.
    if not storage.resizable():
        return "its memory belongs to somebody else than torch"
    if key_of(storage) in shared:
        return "it is shared with another process"
    if segments.at(storage.data_ptr()).is_private:
        return "it lies in a memory pool of its own, whose addresses may be in use"
    return ""


def _reason_of_owners(holding: Holding) -> str:
    if holding.n_unseen:
        return (
            "something in C++ that can't be seen uses it too, such as another library by DLPack, "
            "an operation that is running, or the graph of a change to a view"
        )
    # Its class can't be exchanged for one that refuses, and a silent read of freed bytes is worse
    # than memory that stays; see test_a_subclass_with_slots_stays.
    blunt = [type(handle).__name__ for handle in holding.handles if not can_guard(handle)]
    if blunt:
        return f"a {blunt[0]} has slots, so its use meanwhile could not be refused"
    return ""


def _host_memory(going: list[Holding], device: torch.device) -> list[Tensor]:
    needed_bytes = sum(held.storage.nbytes() for held in going)
    free_bytes = free_host_bytes()
    # Linux grants memory that it does not have, and kills the process that writes to it.
    if needed_bytes > free_bytes:
        raise CourtesyError(_no_room(needed_bytes, device, f"{format_bytes(free_bytes)} are free"))
    try:
        return [_staging.host_bytes(held.storage.nbytes()) for held in going]
    except (RuntimeError, MemoryError) as error:
        raise CourtesyError(_no_room(needed_bytes, device, "an allocation failed")) from error


def _no_room(needed_bytes: int, device: torch.device, why: str) -> str:
    return (
        f"{format_bytes(needed_bytes)} on {device} don't fit in the memory of the host: {why}. "
        "Nothing was moved. Let go of tensors first, or name one device of several."
    )


def _stays(staying: list[tuple[Holding, str]]) -> list[Stay]:
    staying.sort(key=lambda pair: pair[0].storage.nbytes(), reverse=True)
    names = _names([held for held, _ in staying[:_NAMED]])
    names += [""] * (len(staying) - len(names))
    return [
        Stay(_text_of(held), held.storage.nbytes(), reason, name)
        for (held, reason), name in zip(staying, names, strict=True)
    ]


def _names(holdings: list[Holding]) -> list[str]:
    """Who holds one tensor of each, in the words of leak reports."""
    handles = [held.handles[:_TRIED] for held in holdings]
    flat = [handle for some in handles for handle in some]
    if not flat:
        return [""] * len(holdings)
    ours = [*handles, *(held.tensors for held in holdings), *(held.wrappers for held in holdings)]
    chains = iter(find_holders(flat, ignore=ours))
    found = [[holder for _ in some for holder in next(chains)] for some in handles]
    return [
        next((h.chain for h in some if h.named and h.kind not in _NAMELESS), "") for some in found
    ]


def _text_of(held: Holding) -> str:
    for handle in held.handles:
        return describe_tensor(handle)
    return f"a storage of {format_bytes(held.storage.nbytes())} on {held.storage.device}"
