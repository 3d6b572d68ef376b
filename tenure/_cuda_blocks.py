"""How an allocator rounds as CUDA's does: a request up to a block, a block up to its segment.

Invariant: as of CUDA's caching allocator with its default settings. The CPU's takes what it is
asked for.
"""

from __future__ import annotations

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


def is_rounding(device: torch.device) -> bool:
    """Whether a device's allocator takes more than it is asked for."""
    return device.type != "cpu"


def whole_block_bytes(n_bytes: int, device: torch.device) -> int:
    """The least size from ``n_bytes`` on that an empty allocator does not round."""
    if not is_rounding(device):
        return n_bytes
    return up_to(n_bytes, BLOCK_BYTES if n_bytes < OWN_SEGMENT_BYTES else SEGMENT_STEP_BYTES)


def up_to(n_bytes: int, step_bytes: int) -> int:
    """The next multiple of a step."""
    return -(-n_bytes // step_bytes) * step_bytes


def rounded(requested_bytes: int) -> int:
    """The size of the block that a request needs."""
    return up_to(requested_bytes, BLOCK_BYTES)


def is_small(block_bytes: int) -> bool:
    """Whether a block of this size comes from the small pool."""
    return block_bytes <= _LARGEST_SMALL_BYTES


def is_cut(rest_bytes: int, *, is_small: bool) -> bool:
    """Whether what a request leaves over of a block of a pool becomes a free block of its own."""
    return rest_bytes >= BLOCK_BYTES if is_small else rest_bytes > _LARGEST_SMALL_BYTES


def segment_bytes(block_bytes: int) -> int:
    """How much is taken from the device where no free block is left for one of this size."""
    if is_small(block_bytes):
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return up_to(block_bytes, SEGMENT_STEP_BYTES)
