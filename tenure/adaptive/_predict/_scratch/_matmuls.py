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


# oneDNN reorders a part of each operand, and sums in 32 bits. What these parts take at most,
# in each thread, seen over 3000 shapes; how large it makes them goes by caches and by shapes.
_LEFT_BYTES, _RIGHT_BYTES, _SUM_BYTES, _FIXED_BYTES = 2_500_000, 3_300_000, 1_000_000, 96_000
_PADDING = 64
# of float16 it computes so many columns at once
_WIDE_PADDING = 192


def _copied_bytes(a: Tensor, b: Tensor) -> int | None:
    """Bytes of the operands that have to be copied; None where another library computes."""
    if a.dtype not in _KNOWN or not a.numel() or not b.numel():
        return None
    n_bytes = sum(
        0 if _is_readable(each) else each.numel() * each.element_size() for each in (a, b)
    )
    return n_bytes if a.dtype in _BLAS else n_bytes + _reordered_bytes(a, b)


def _reordered_bytes(a: Tensor, b: Tensor) -> int:
    """A bound, of one matrix: others of a batch take the same memory again."""
    wide = _WIDE_PADDING if a.dtype is torch.float16 else _PADDING
    rows, inner = _padded(a.shape[-2], _PADDING), _padded(a.shape[-1], _PADDING)
    columns = _padded(b.shape[-1], wide)
    parts = (
        min(rows * inner * a.element_size(), _LEFT_BYTES),
        min(inner * columns * b.element_size(), _RIGHT_BYTES),
        min(rows * columns * 4, _SUM_BYTES),
        _FIXED_BYTES,
    )
    return torch.get_num_threads() * sum(parts)


def _padded(n: int, grain: int) -> int:
    return -(-n // grain) * grain


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
