"""The memory of a device at the moment of an error, and what an error should tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tenure._devices import accelerator_of
from tenure._text import format_bytes
from tenure._torch.device_allocator import free_block_bytes, has_expandable_segments, segments_of

from .._memory import held_by
from .._oom import OomInfo, unallocated_bytes_in

_ADVICE = "set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts"


@dataclass(frozen=True, slots=True)
class Scene:
    """The memory of a device at the moment of the error, before anything was let go.

    Attributes:
        unused_bytes: what the allocator held and no tensor used; None where it can't be told.
        pieces: how that lay, if there was enough of it for the request.
    """

    unused_bytes: int | None
    pieces: Fragmentation | None = None


def scene_of(info: OomInfo) -> Scene:
    """Read the error, or the allocator; called inside ``except``.

    The error is of the moment when memory ran out. Since then, values that the interpreter held
    for the operation have died.
    """
    found, told_bytes = accelerator_of(info.device), unallocated_bytes_in(info.text)
    if found is None:
        return Scene(told_bytes)
    try:
        if told_bytes is None:
            return Scene(held_by(*found).unused_bytes)
        return Scene(told_bytes, fragmentation_of(*found, told_bytes, info.requested_bytes))
    # a device without statistics
    except Exception:
        return Scene(told_bytes)


class Fragmentation(NamedTuple):
    """Free memory that would have sufficed, were it in one piece.

    Attributes:
        unused_bytes: what the allocator held and no tensor used.
        reserved_bytes: all that it held.
        split_bytes: what of the unused lies in segments that something else uses.
        largest_bytes: the largest free block; None where it can't be told.
        is_expandable: whether segments grow and shrink already.
    """

    unused_bytes: int
    reserved_bytes: int
    split_bytes: int
    largest_bytes: int | None
    is_expandable: bool

    def __str__(self) -> str:
        unused, reserved = format_bytes(self.unused_bytes), format_bytes(self.reserved_bytes)
        text = f"{unused} of {reserved} reserved were not allocated, yet in pieces"
        if self.largest_bytes is not None:
            text += f" of {format_bytes(self.largest_bytes)} at the most"
        if self.split_bytes:
            text += f" ({format_bytes(self.split_bytes)} beside tensors in one segment)"
        return text if self.is_expandable else f"{text}: {_ADVICE}"


def fragmentation_of(
    module: Any, device: torch.device, unused_bytes: int, requested_bytes: int | None
) -> Fragmentation | None:
    """What to tell of an allocation that failed; None where the unused memory was too little.

    Args:
        module: that of the device.
        device: the device, with its index.
        unused_bytes: what was unused when the allocation failed.
        requested_bytes: what it asked for.
    """
    # with less unused than was wanted, no other order of the blocks would have helped
    if requested_bytes is None or unused_bytes < requested_bytes:
        return None
    held, largest_bytes = held_by(module, device), _largest_free_block(module, device)
    if largest_bytes is not None and largest_bytes >= requested_bytes:
        # it came free since, as what the interpreter held for the operation
        largest_bytes = None
    return Fragmentation(
        unused_bytes,
        max(held.reserved_bytes, unused_bytes),
        min(held.split_bytes, unused_bytes),
        largest_bytes,
        has_expandable_segments(),
    )


def _largest_free_block(module: Any, device: torch.device) -> int | None:
    """None where the allocator shows no blocks, or has none free."""
    return max(free_block_bytes(segments_of(module, device)), default=None)
