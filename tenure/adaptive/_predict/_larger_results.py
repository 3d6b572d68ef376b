"""Results whose memory real kernels make larger than torch's kernels without data say.

They live on like any result, so they are no scratch: a loss that is one number may keep the memory
of all numbers that it is the mean of, through the whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._scratch import rnn_workspace_bytes

_aten = torch.ops.aten
_NO_REDUCTION = 0


def _enlarged(tensor: Tensor, n_elements: int) -> Tensor:
    if n_elements * tensor.element_size() <= tensor.untyped_storage().nbytes():
        return tensor
    return tensor.new_empty(n_elements).as_strided(tensor.shape, tensor.stride())


def _loss(func: Any, position: int, *args: Any, **kwargs: Any) -> Tensor:
    """The kernel computes every element, and then makes one number in the same memory."""
    result: Tensor = func(*args, **kwargs)
    reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
    if reduction == _NO_REDUCTION:
        return result
    return _enlarged(result, torch.broadcast_shapes(args[0].shape, args[1].shape).numel())


def _like_input(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The kernel makes something like its input first, and resizes that."""
    return _enlarged(func(*args, **kwargs), args[0].numel())


def _embedding_bag(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    out, offset2bag, bag_size, largest = func(*args, **kwargs)
    if out.device.type == "cpu":
        # one more while it is computed
        if offset2bag.numel():
            offset2bag = _enlarged(offset2bag, offset2bag.numel() + 1)
        # with the last offset, that ends a bag and begins none
        bag_size = _enlarged(bag_size, args[2].numel())
    return out, offset2bag, bag_size, largest


def _rnn_layer(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    out, hidden, cell, workspace = func(*args, **kwargs)
    n_bytes = rnn_workspace_bytes(args)
    if n_bytes:
        workspace = workspace.new_empty(n_bytes, dtype=torch.uint8)
    return out, hidden, cell, workspace


def _rnn_layer_backward(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    results = list(func(*args, **kwargs))
    # the gradients of the two biases are equal, but two
    if isinstance(results[4], Tensor):
        results[4] = torch.empty_like(results[4])
    return tuple(results)


def _of(make: Callable[..., Any], func: Any, *more: Any) -> tuple[Any, Callable[..., Any]]:
    return func, lambda *args, **kwargs: make(func, *more, *args, **kwargs)


LARGER: dict[Any, Callable[..., Any]] = dict(
    (
        _of(_loss, _aten.mse_loss.default, 2),
        _of(_loss, _aten.smooth_l1_loss.default, 2),
        _of(_loss, _aten.soft_margin_loss.default, 2),
        _of(_loss, _aten.binary_cross_entropy.default, 3),
        _of(_like_input, _aten.col2im.default),
        _of(_like_input, _aten.im2col.default),
        _of(_embedding_bag, _aten._embedding_bag.default),
        _of(_rnn_layer, _aten.mkldnn_rnn_layer.default),
        _of(_rnn_layer_backward, _aten.mkldnn_rnn_layer_backward.default),
    )
)
"""What gives the results of these operations, with the memory that the real ones have."""
