"""How the caching allocators of torch are set up, and which segments they hold.

For the first torch has no public question: a program says it in ``PYTORCH_ALLOC_CONF``, before it
starts or while it runs.
"""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C
_SETTINGS = "_accelerator_getAllocatorSettings"
_SHARED_POOL = (0, 0)
FREE = "inactive"
"""The state of a block of a segment that holds nothing."""


def has_expandable_segments() -> bool:
    """Whether segments grow and shrink, so that free parts of them can be given back too."""
    settings = getattr(_C, _SETTINGS, str)()
    return "expandable_segments:true" in str(settings).replace(" ", "").lower()


def segments_of(module: Any, device: torch.device) -> list[dict[str, Any]]:
    """The segments of a device, as ``torch.cuda.memory_snapshot()`` tells of them.

    Args:
        module: that of the device.
        device: the device, with its index.

    Returns:
        Empty where the allocator tells nothing of them, as that of MPS or ``cudaMallocAsync``.
    """
    try:
        found = _snapshot(module)
    except (AttributeError, RuntimeError, NotImplementedError):
        return []
    return [segment for segment in found if segment["device"] == device.index]


def free_block_bytes(segments: list[dict[str, Any]]) -> list[int]:
    """The sizes of the free blocks that any tensor may get: a CUDA graph keeps its pool's."""
    shared = (s for s in segments if tuple(s.get("segment_pool_id", _SHARED_POOL)) == _SHARED_POOL)
    blocks = (block for segment in shared for block in segment.get("blocks", ()))
    return [block["size"] for block in blocks if block["state"] == FREE]


def works() -> bool:
    """Whether torch tells the settings as a text."""
    return isinstance(getattr(_C, _SETTINGS, bool)(), str)


def _snapshot(module: Any) -> list[dict[str, Any]]:
    try:
        found = module.memory_snapshot(include_traces=False)
    except TypeError:  # only CUDA's has traces, which may be long
        found = module.memory_snapshot()
    return list(found)
