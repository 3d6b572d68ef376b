"""How far two tensors are apart, whatever their layout and type."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest value of ``b``; NaN where only one is NaN.

    Args:
        a: any tensor.
        b: one of the same shape.
        floor: differences are relative to this where ``b`` has only smaller values.
    """
    if a.numel() == 0:
        return 0.0
    a, b = _comparable(a), _comparable(b)
    if torch.equal(a.isnan(), b.isnan()):
        a, b = a.nan_to_num(), b.nan_to_num()
    difference = float((a - b).abs().max())
    return difference / (max(float(b.abs().max()), floor) or 1.0)


def largest_value(x: Tensor) -> float:
    """The largest absolute value; 0 for none."""
    return float(_comparable(x).nan_to_num().abs().max()) if x.numel() else 0.0


def _comparable(x: Tensor) -> Tensor:
    x = x.to_dense() if x.layout is not torch.strided else x
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().cpu().double()
