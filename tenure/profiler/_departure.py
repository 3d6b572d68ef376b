"""The first half of moving: what can go is copied to host memory, and nothing is changed yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch
from torch import Tensor

from tenure._describe import describe_tensor
from tenure._errors import CourtesyError
from tenure._units import format_bytes

from . import _conveyor
from ._courtesy_report import Stay
from ._immovable import Judge
from ._inventory import Holding
from ._moved import Moved
from ._segments import Segments

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
    going: list[Holding] = []
    stays: list[Stay] = []
    for held in holdings:
        reason = judge.reason(held)
        if reason:
            stays.append(Stay(_text_of(held), held.storage.nbytes(), reason))
        else:
            going.append(held)
    loads = list(zip((held.storage for held in going), _host_memory(going, device), strict=True))
    if loads:
        _conveyor.to_host(loads, device)
    ready = [
        (held, Moved(courtesy, held, host, segments.at(held.storage.data_ptr())))
        for held, (_, host) in zip(going, loads, strict=True)
    ]
    return Departure(ready, stays)


def _host_memory(going: list[Holding], device: torch.device) -> list[Tensor]:
    needed_bytes = sum(held.storage.nbytes() for held in going)
    free_bytes = psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise CourtesyError(_no_room(needed_bytes, device, f"{format_bytes(free_bytes)} are free"))
    try:
        return [_conveyor.host_bytes(held.storage.nbytes()) for held in going]
    except (RuntimeError, MemoryError) as error:
        raise CourtesyError(_no_room(needed_bytes, device, "an allocation failed")) from error


def _no_room(needed_bytes: int, device: torch.device, why: str) -> str:
    return (
        f"{format_bytes(needed_bytes)} on {device} don't fit in the memory of the host: {why}. "
        "Nothing was moved. Let go of tensors first, or name one device of several."
    )


def _text_of(held: Holding) -> str:
    for handle in held.handles:
        return describe_tensor(handle)
    return f"a storage of {format_bytes(held.storage.nbytes())} on {held.storage.device}"
