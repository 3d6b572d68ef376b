"""What the caching allocators of devices hold, and the working memory that torch keeps for cuBLAS.

A program says how an allocator is set up in ``PYTORCH_ALLOC_CONF``, before it starts or while it
runs, and torch has no public question for it.

For cuBLAS torch takes one block from its own allocator for each thread and each stream that
multiplied matrices, and keeps it for good. It offers no public way to let them go.

Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` of PyTorch.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import torch

from tenure._graph_capture import is_capturing, kind_of_live_graph

from . import bound, optional

# a build without CUDA has none of these, so each can be missing
_SETTINGS = "torch._C._accelerator_getAllocatorSettings"
_SNAPSHOT = "torch._C._cuda_memorySnapshot"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CLEAR = "torch._C._cuda_clearCublasWorkspaces"
# the first torch that has functions for the sizes of workspaces; their defaults before it
_HAS_SIZES = "2.13"
_WORKSPACE_BYTES = 8_519_680
# on Hopper and Blackwell, see `_older_workspace_bytes`
_LARGE_WORKSPACE_BYTES = 32 << 20
_LT_WORKSPACE_KIB = 1024
_SHARED_POOL = (0, 0)
_NO_POOL = (1, 1)
FREE = "inactive"
"""The state of a block of a segment that holds nothing."""

_WORKSPACES = "the working memory of cuBLAS, which budgets and predictions allow for"
_cublas_bytes = bound("torch._C._cuda_getCublasWorkspaceSize", _WORKSPACES)
_cublaslt_bytes = bound("torch._C._cuda_getCublasLtWorkspaceSize", _WORKSPACES)


def has_expandable_segments() -> bool:
    """Return whether segments grow and shrink, so that free parts of them can be given back too."""
    if (tell := optional(_SETTINGS)) is not None:
        settings = tell()
    # torch 2.11 lacks that function, but a snapshot has the settings, also one of no blocks
    elif (snapshot := optional(_SNAPSHOT)) is not None:
        return bool(snapshot(_NO_POOL)["allocator_settings"]["expandable_segments"])
    else:
        settings = next(filter(None, map(os.environ.get, _VARIABLES)), "")
    return "expandable_segments:true" in str(settings).replace(" ", "").lower()


def segments_of(module: Any, device: torch.device) -> list[dict[str, Any]]:
    """Return the segments of a device, as ``torch.cuda.memory_snapshot()`` tells of them.

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


def is_private(segment: dict[str, Any]) -> bool:
    """Return whether a segment belongs to a pool of its own, as that of a CUDA graph."""
    # without a pool in the entry (other backends) there is the shared one alone
    return tuple(segment.get("segment_pool_id", _SHARED_POOL)) != _SHARED_POOL


def free_block_bytes(segments: list[dict[str, Any]]) -> list[int]:
    """Return the sizes of free blocks that any tensor may get; not those of CUDA graphs."""
    shared = (segment for segment in segments if not is_private(segment))
    blocks = (block for segment in shared for block in segment.get("blocks", ()))
    return [block["size"] for block in blocks if block["state"] == FREE]


def workspace_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes of a block by library, as torch takes it at the next use.

    How many blocks there are is not told. An accelerator that is not in use is not brought to life.
    """
    if not _keeps_workspaces(device):
        return {}
    if torch.__version__ < _HAS_SIZES and not torch.version.hip:
        return _older_workspace_bytes(device)
    return {"cuBLAS": int(_cublas_bytes()), "cuBLASLt": int(_cublaslt_bytes())}


def clear_workspaces(device: torch.device) -> int:
    """Let go of the blocks of all devices of a type where that is safe; bytes freed on this one.

    A block goes back to the stream that used it, so that work under way keeps it, and its bytes
    stay in the cache. It is not safe

    - while a graph is captured, or one that was is alive: it uses the addresses it was captured
      with, and a workspace that was made before the capture lies in memory that can be given back;
    - while another thread runs: it may hold a block's address for the multiplication that it is
      about to launch.
    """
    if not _keeps_workspaces(device) or len(sys._current_frames()) > 1:
        return 0
    if is_capturing(device) or kind_of_live_graph(device) is not None:
        return 0
    module: Any = torch.get_device_module(device)
    before_bytes = int(module.memory_allocated(device))
    optional(_CLEAR)()
    return max(0, before_bytes - int(module.memory_allocated(device)))


def _snapshot(module: Any) -> list[dict[str, Any]]:
    try:
        found = module.memory_snapshot(include_traces=False)
    # only CUDA's has traces, which may be long
    except TypeError:
        found = module.memory_snapshot()
    return list(found)


def _older_workspace_bytes(device: torch.device) -> dict[str, int]:
    """Compute the sizes as torch 2.10 to 2.12 do from the environment, without a function for it.

    Source: ``parseChosenWorkspaceSize`` and ``parseCUDABlasLtWorkspaceSize`` of
    https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/cuda/CublasHandlePool.cpp
    """
    given = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    major, minor = torch.get_device_module(device).get_device_capability(device)
    is_large = (major, minor) == (9, 0) or (torch.__version__ >= "2.12" and major in (9, 10, 12))
    n_bytes = _LARGE_WORKSPACE_BYTES if is_large else _WORKSPACE_BYTES
    if given:
        n_bytes = sum(int(kib) * int(n) << 10 for kib, n in given)
    found = {"cuBLAS": n_bytes}
    shares = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    # if it shares that of cuBLAS, it has none of its own
    if shares == "0" or (shares != "1" and torch.__version__ < "2.11"):
        given_kib = re.match(r"\s*\d+", os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
        found["cuBLASLt"] = int(given_kib[0] if given_kib else _LT_WORKSPACE_KIB) << 10
    return found


def _keeps_workspaces(device: torch.device) -> bool:
    if device.type != "cuda" or optional(_CLEAR) is None:
        return False
    return bool(torch.get_device_module(device).is_initialized())
