"""The working memory that torch keeps for cuBLAS, outside of any tensor.

torch takes one block from its own allocator for each thread and each stream that multiplied
matrices, and keeps it for good. It offers no public way to let them go.

Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` of PyTorch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tenure._capture import is_capturing, kind_of_live_graph

_C: Any = torch._C
_CLEAR = "_cuda_clearCublasWorkspaces"


def workspace_bytes(device: torch.device) -> dict[str, int]:
    """Bytes of one block by library, as torch takes it at the next use; empty where it keeps none.

    How many blocks there are is not told. An accelerator that is not in use is not brought to life.
    """
    if not _keeps_workspaces(device):
        return {}
    return {
        "cuBLAS": int(torch.backends.cuda.cublas_workspace_size()),
        "cuBLASLt": int(torch.backends.cuda.cublaslt_workspace_size()),
    }


def clear_workspaces(device: torch.device) -> int:
    """Let go of the blocks of all devices of a type where that is safe; bytes freed on this one.

    A block goes back to the stream that used it, so that work under way keeps it, and its bytes
    stay in the cache. It is not safe

    - while a graph is captured, or one that was is alive: it uses the addresses it was captured
      with, and a workspace that was made before the capture lies in memory that can be given back;
    - while another thread runs: it may hold a block's address for the multiplication that it is
      about to launch.
    """
    if not _keeps_workspaces(device) or not _is_safe(device):
        return 0
    module: Any = torch.get_device_module(device)
    before_bytes = int(module.memory_allocated(device))
    getattr(_C, _CLEAR)()
    return max(0, before_bytes - int(module.memory_allocated(device)))


def works() -> bool:
    """Whether a build of torch with CUDA has the names used here; one without needs none."""
    names = (_CLEAR, "_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    return not torch.backends.cuda.is_built() or all(hasattr(_C, name) for name in names)


def _keeps_workspaces(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(_C, _CLEAR):
        return False
    return bool(torch.get_device_module(device).is_initialized())


def _is_safe(device: torch.device) -> bool:
    is_alone = len(sys._current_frames()) == 1
    return is_alone and not is_capturing(device) and kind_of_live_graph(device) is None
