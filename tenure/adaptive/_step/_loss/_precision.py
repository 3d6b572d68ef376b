"""In which types sums and weights are computed, so that they lose nothing."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..._oom import is_oom


def widened(value: Tensor) -> Tensor:
    """A scalar in the precision that sums of several are made in."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def widened_count(count: Tensor | float) -> Tensor | float:
    """A count in a type that sums of several fit into: in bfloat16, 256 and 1 are 256."""
    if not isinstance(count, Tensor) or count.is_complex():
        return count
    return widened(count) if count.is_floating_point() else count.long()


def widest_float(device: torch.device) -> torch.dtype:
    """The widest type of floating point that a device has."""
    if device.type in ("cpu", "cuda"):
        return torch.float64
    return torch.float64 if _has_float64(device) else torch.float32


@lru_cache(maxsize=64)
def _has_float64(device: torch.device) -> bool:
    """Whether a device computes in it, as MPS and some XPUs don't; asked once of each."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError) as error:
        if is_oom(error):
            raise
        return False
    return True
