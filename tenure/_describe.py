"""One spelling."""

from __future__ import annotations

import torch

from tenure._units import format_bytes


def describe(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, n_bytes: int) -> str:
    """X."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}, {format_bytes(n_bytes)}"
