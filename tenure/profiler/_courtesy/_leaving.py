"""The first half of moving: what can go is copied to host memory, and nothing is changed yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tenure._errors import CourtesyError
from tenure._heap import find_holders
from tenure._host_memory import free_host_bytes
from tenure._text import describe_tensor, format_bytes

from . import _staging
from ._address_segments import Segments
from ._courtesy_report import Stay
from ._immovable import Judge
from ._inventory import Holding
from ._moved import Moved

# the largest are named, by the first of their tensors that has a name
_NAMED = 8
_TRIED = 4
_NAMELESS = frozenset({"unknown", "cycle"})

if TYPE_CHECKING:
    from ._courtesy import Courtesy


class Departure(NamedTuple):
    """What is ready to leave one device, and what stays there."""

    ready: list[tuple[Holding, Moved]]
    stays: list[Stay]


def depart(courtesy: Courtesy, device: torch.device, holdings: list[Holding]) -> Departure:
    """Judge the holdings of one device, and copy the bytes of those that can go.

    Raises:
        CourtesyError: the host has no memory for them.
    """
    segments = Segments(device)
    judge = Judge(device, segments)
    reasons = [judge.reason(held) for held in holdings]
    going = [held for held, reason in zip(holdings, reasons, strict=True) if not reason]
    staying = [(held, reason) for held, reason in zip(holdings, reasons, strict=True) if reason]
    loads = list(zip((held.storage for held in going), _host_memory(going, device), strict=True))
    if loads:
        _staging.to_host(loads, device)
    ready = [
        (held, Moved(courtesy, held, host, segments.at(held.storage.data_ptr())))
        for held, (_, host) in zip(going, loads, strict=True)
    ]
    return Departure(ready, _stays(staying))


def _host_memory(going: list[Holding], device: torch.device) -> list[Tensor]:
    needed_bytes = sum(held.storage.nbytes() for held in going)
    free_bytes = free_host_bytes()
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
