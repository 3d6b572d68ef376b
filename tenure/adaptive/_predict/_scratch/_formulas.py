"""Kernels that take what follows from the shapes of their arguments.

Some of them would trust made-up arguments: a forward pass has to have filled a workspace, and sizes
have to agree in ways that a problem made smaller breaks. They are not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _recurrent

_aten = torch.ops.aten
Formula = Callable[[Any, Any], int]
"""Bytes, by the arguments and the result of a call."""

_INDEX_BYTES = 8
_MAXIMUM = 2
# a matrix is turned by tiles of 60 by 60
_TILE = 3600
# a few numbers of its own
_FEW_BYTES = 64


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copied(tensor: Tensor) -> int:
    """Bytes of a contiguous copy if one has to be made."""
    return 0 if tensor.is_contiguous() else _n_bytes(tensor)


def _wide(tensor: Tensor) -> int:
    """Bytes of a number that sums are kept in."""
    return max(4, tensor.element_size())


def _resized_copy(args: Any, result: Any) -> int:
    """What is made like the input, and is outgrown by the output."""
    source = args[0]
    outgrown = _n_bytes(source) if source.numel() < result.numel() else 0
    return outgrown + _copied(source)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _copy(args: Any, result: Any) -> int:
    """A tile, where a matrix is turned."""
    target: Tensor = args[0]
    source: Tensor = args[1]
    is_turned = source.dim() == 2 and source.stride(0) == 1 and not source.is_contiguous()
    return _TILE * target.element_size() if is_turned else 0


def _group_norm(args: Any, result: Any) -> int:
    """Two sums of each channel in each thread, and of each group, where channels are last."""
    x: Tensor = args[0]
    n_samples: int = args[3]
    n_channels: int = args[4]
    n_groups: int = args[6]
    copies = sum(_copied(each) for each in args[1:3] if each is not None)
    if x.is_contiguous():
        return copies
    sums = 2 * n_samples * (n_channels * torch.get_num_threads() + n_groups) * _wide(x)
    return sums + copies + (0 if _is_channels_last(x) else _n_bytes(x))


def _group_norm_backward(args: Any, result: Any) -> int:
    grad, x = args[:2]
    n_samples: int = args[5]
    n_channels: int = args[6]
    is_last = _is_channels_last(x)
    copies = sum(0 if is_last and _is_channels_last(each) else _copied(each) for each in (grad, x))
    weight: Tensor | None = args[4]
    copies += 0 if weight is None else _copied(weight)
    n_sums = torch.get_num_threads() if is_last else 1
    return copies + 2 * n_sums * n_samples * n_channels * _wide(x)


def _nonzero_static(args: Any, result: Any) -> int:
    """The indices of all elements, in case none is zero, of which it copies as many as asked."""
    x: Tensor = args[0]
    # before 2.14 it wrote only that many
    return x.numel() * x.dim() * _INDEX_BYTES if torch.__version__ >= "2.14" else 0


def _ctc_backward(args: Any, result: Any) -> int:
    targets, log_alpha = args[2], args[-3] if isinstance(args[-1], bool) else args[6]
    return _n_bytes(log_alpha) + _copied(targets) + _copied(args[1]) + _FEW_BYTES


def _unfold_backward(args: Any, result: Any) -> int:
    """The place of each element."""
    sizes: list[int] = args[1]
    dim: int = args[2]
    return sizes[dim] * _INDEX_BYTES if sizes else _FEW_BYTES


def _repeat_interleave(args: Any, result: Any) -> int:
    """The running sum of the repeats, and which of them are below zero."""
    repeats: Tensor = args[0]
    return repeats.numel() * (2 * _INDEX_BYTES + 1) + _FEW_BYTES


def _euclidean_dist(args: Any, result: Any) -> int:
    """Both operands with their squares beside them; the left one is multiplied first."""
    x: Tensor = args[0]
    y: Tensor = args[1]
    width, size = x.shape[-1], x.element_size()
    rows, columns = x.numel() // max(width, 1), y.numel() // max(width, 1)
    together = (rows + columns) * (width + 2) * size
    before = (rows * (2 * width + 4) + 2 * columns) * size
    return max(together, before - _n_bytes(result)) + _copied(x) + _copied(y) + _FEW_BYTES


def _fft_to_real(args: Any, result: Any) -> int:
    """It overwrites its input where it goes along several dimensions."""
    x: Tensor = args[0]
    dims: list[int] = args[1]
    if len(dims) > 1:
        return 2 * _n_bytes(x)
    rows_are_there = x.stride(dims[0]) == 1 and 0 not in x.stride() and not x.is_conj()
    return 0 if rows_are_there else _n_bytes(x)


def _embedding_bag_backward(args: Any, result: Any) -> int:
    """The indices sorted, where they were, and the bag of each; or the bags that have a largest."""
    grad: Tensor = args[0]
    indices: Tensor = args[1]
    offset2bag: Tensor = args[3]
    n, size = indices.numel(), indices.element_size()
    taken = _copied(grad) + _FEW_BYTES
    if args[8] == _MAXIMUM:
        bag_size: Tensor = args[4]
        bags = bag_size.numel() * (2 * _INDEX_BYTES + size)
        return taken + _n_bytes(args[5]) + _n_bytes(grad) + bags
    missing = 0 if offset2bag.numel() else (n + 1) * size
    # and the weight of each
    weights = n * grad.element_size() if len(args) > 10 and args[10] is not None else 0
    return taken + missing + weights + n * (size + 2 * _INDEX_BYTES)


FORMULAS: dict[Any, Formula] = {
    _aten.mkldnn_rnn_layer.default: lambda args, _: _recurrent.forward_bytes(args),
    _aten.mkldnn_rnn_layer_backward.default: lambda args, _: _recurrent.backward_bytes(args),
    _aten.copy_.default: _copy,
    _aten.im2col.default: _resized_copy,
    _aten.col2im.default: _resized_copy,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.nonzero_static.default: _nonzero_static,
    _aten._ctc_loss.default: lambda args, _: _copied(args[1]) + _copied(args[0]),
    _aten._ctc_loss.Tensor: lambda args, _: _copied(args[1]) + _copied(args[0]),
    _aten._ctc_loss_backward.default: _ctc_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_backward,
    _aten.unfold_backward.default: _unfold_backward,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten._euclidean_dist.default: _euclidean_dist,
    _aten._fft_c2r.default: _fft_to_real,
    _aten._embedding_bag_backward.default: _embedding_bag_backward,
}
