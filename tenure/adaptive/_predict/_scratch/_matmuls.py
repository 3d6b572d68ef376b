"""Products of matrices: BLAS reads rows or columns with gaps between; all else is copied first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

_BLAS = frozenset({torch.float32, torch.float64})


def _copied_bytes(*matrices: Tensor) -> int | None:
    """Bytes of the operands that have to be copied; None where another library computes."""
    if matrices[0].dtype not in _BLAS or any(not each.numel() for each in matrices):
        return None
    return sum(0 if _is_readable(each) else each.numel() * each.element_size() for each in matrices)


def _is_readable(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


RULES: dict[Any, Callable[[Any], int | None]] = {
    _aten.mm.default: lambda args: _copied_bytes(args[0], args[1]),
    _aten.bmm.default: lambda args: _copied_bytes(args[0], args[1]),
    _aten.addmm.default: lambda args: _copied_bytes(args[1], args[2]),
    _aten.baddbmm.default: lambda args: _copied_bytes(args[1], args[2]),
}
"""Bytes that a product takes, by its arguments; None where that is to be measured."""
