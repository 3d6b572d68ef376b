"""Which tensors the CUDA graphs of ``torch.compile(mode="reduce-overhead")`` hand out again.

Such a graph returns the same handle from each replay, to save making one, so a handle that has let
go of its tensor would come out of the next. torch notes them for autograd and for autocast; outside
of that mode there are none, and nothing is asked.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C
_TREES = "torch._inductor.cudagraph_trees"


def belongs_to_graph(tensor: Tensor) -> bool:
    """Whether a graph will hand out this very tensor again; views and copies of it are others.

    Args:
        tensor: a tensor of any shape, dtype, device and subclass.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/cudagraph_trees.py
    """
    if _TREES not in sys.modules:
        return False
    ask = getattr(_C, "_is_cached_tensor", None)
    return ask is not None and bool(ask(tensor))


def works() -> bool:
    """Whether torch still tells a tensor that is noted from one that is not."""
    return hasattr(_C, "_is_cached_tensor") and not _C._is_cached_tensor(torch.empty(0))
