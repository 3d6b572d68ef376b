"""What blocks take of a device whose allocator rounds them up, as CUDA's, in whole segments.

Invariant: as of CUDA's caching allocator with its default settings, empty and serving nobody else.
The CPU's takes what it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

MIB = 2**20

# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h
BLOCK_BYTES = 512
_LARGEST_SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a block has a segment of its own, of whole ``SEGMENT_STEP_BYTES``."""
SEGMENT_STEP_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of a device.

    Attributes:
        allocated_bytes: of the blocks, with what is too little to be a block of its own.
        reserved_bytes: of the segments that they lie in.
    """

    allocated_bytes: int
    reserved_bytes: int


def is_rounding(device: torch.device) -> bool:
    """Whether a device's allocator takes more than it is asked for."""
    return device.type != "cpu"


def taken_by(sizes: Iterable[int], device: torch.device) -> Taken:
    """What blocks of these sizes take, allocated one after the other."""
    if not is_rounding(device):
        n_bytes = sum(sizes)
        return Taken(n_bytes, n_bytes)
    allocated_bytes = reserved_bytes = 0
    free: dict[bool, list[int]] = {True: [], False: []}
    for size in filter(None, sizes):
        block_bytes = up_to(size, BLOCK_BYTES)
        is_small = block_bytes <= _LARGEST_SMALL_BYTES
        found_bytes = min((each for each in free[is_small] if each >= block_bytes), default=0)
        if found_bytes:
            free[is_small].remove(found_bytes)
        else:
            found_bytes = _segment_bytes(block_bytes)
            reserved_bytes += found_bytes
        rest_bytes = found_bytes - block_bytes
        is_cut = rest_bytes >= BLOCK_BYTES if is_small else rest_bytes > _LARGEST_SMALL_BYTES
        if is_cut:
            free[is_small].append(rest_bytes)
        allocated_bytes += block_bytes if is_cut else found_bytes
    return Taken(allocated_bytes, reserved_bytes)


def whole_block_bytes(n_bytes: int, device: torch.device) -> int:
    """The least size from ``n_bytes`` on that an empty allocator does not round."""
    if not is_rounding(device):
        return n_bytes
    return up_to(n_bytes, BLOCK_BYTES if n_bytes < OWN_SEGMENT_BYTES else SEGMENT_STEP_BYTES)


def up_to(n_bytes: int, step_bytes: int) -> int:
    """The next multiple of a step."""
    return -(-n_bytes // step_bytes) * step_bytes


def _segment_bytes(block_bytes: int) -> int:
    if block_bytes <= _LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return up_to(block_bytes, SEGMENT_STEP_BYTES)
