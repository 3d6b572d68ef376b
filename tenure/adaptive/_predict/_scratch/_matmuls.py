"""Products of matrices: BLAS reads rows or columns with gaps between; all else is copied first.

Of 16 bits oneDNN reorders parts; what that takes at most is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

_BLAS = frozenset({torch.float32, torch.float64})
_KNOWN = _BLAS | {torch.bfloat16, torch.float16}


# oneDNN reorders a part of each operand, and sums in 32 bits: at most so many rows of the left one,
# columns of the right one, rows and columns of the result. Seen are up to 768 columns.
_MOST_ROWS, _MOST_COLUMNS, _MOST_SUMS = 256, 1024, 256
_PADDING = 64
_FIXED_BYTES = 64 << 10


def _copied_bytes(a: Tensor, b: Tensor) -> int | None:
    """Bytes of the operands that have to be copied; None where another library computes."""
    if a.dtype not in _KNOWN or not a.numel() or not b.numel():
        return None
    n_bytes = sum(
        0 if _is_readable(each) else each.numel() * each.element_size() for each in (a, b)
    )
    return n_bytes if a.dtype in _BLAS else n_bytes + _reordered_bytes(a, b)


def _reordered_bytes(a: Tensor, b: Tensor) -> int:
    """A bound: how large the parts are goes by caches, but not by the number of matrices."""
    rows, inner, columns = map(_padded, (a.shape[-2], a.shape[-1], b.shape[-1]))
    operands = inner * (min(rows, _MOST_ROWS) + min(columns, _MOST_COLUMNS)) * a.element_size()
    sums = min(rows, _MOST_SUMS) * min(columns, _MOST_SUMS) * 4
    return torch.get_num_threads() * (operands + sums + _FIXED_BYTES)


def _padded(n: int) -> int:
    return -(-n // _PADDING) * _PADDING


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
