"""Results whose memory real kernels make larger than torch's kernels without data say.

They live on like any result, so they are no scratch: a loss that is one number may keep the memory
of all numbers that it is the mean of, through the whole backward pass. Or they lay it out in
another way: a gradient that is not laid out as its parameter is copied before it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._scratch import rnn_workspace_bytes

_aten = torch.ops.aten
_NO_REDUCTION = 0
_FEATURES_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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


def _laid_out(results: Any, layout: torch.memory_format) -> Any:
    """What a kernel gives, and of the CPU's the first of it laid out so."""
    first, *others = (results,) if isinstance(results, Tensor) else results
    # no gradient of the input may be asked for
    if isinstance(first, Tensor) and first.device.type == "cpu":
        first = torch.empty_like(first, memory_format=layout)
    return first if isinstance(results, Tensor) else (first, *others)


def _batch_norm(func: Any, position: int, *args: Any, **kwargs: Any) -> Any:
    """The kernel gives a batch with its features last as it came, and any other one contiguous."""
    x = args[position]
    last = _FEATURES_LAST.get(x.dim(), torch.contiguous_format)
    # what torch keeps of the layout of a slice, too
    is_last = torch.empty_like(x).is_contiguous(memory_format=last)
    return _laid_out(func(*args, **kwargs), last if is_last else torch.contiguous_format)


def _contiguous(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel gives its first result contiguous, however the inputs are laid out."""
    return _laid_out(func(*args, **kwargs), torch.contiguous_format)


def _of(make: Callable[..., Any], func: Any, *more: Any) -> tuple[Any, Callable[..., Any]]:
    return func, lambda *args, **kwargs: make(func, *more, *args, **kwargs)


LARGER: dict[Any, Callable[..., Any]] = dict(
    (
        _of(_loss, _aten.mse_loss.default, 2),
        _of(_loss, _aten.smooth_l1_loss.default, 2),
        _of(_loss, _aten.soft_margin_loss.default, 2),
        _of(_loss, _aten.binary_cross_entropy.default, 3),
        _of(_batch_norm, _aten.native_batch_norm.default, 0),
        _of(_batch_norm, _aten.native_batch_norm_backward.default, 1),
        _of(_batch_norm, _aten.batch_norm_backward.default, 1),
        _of(_contiguous, _aten.native_layer_norm_backward.default),
        _of(_contiguous, _aten.mse_loss_backward.default),
        _of(_contiguous, _aten.smooth_l1_loss_backward.default),
        _of(_contiguous, _aten.huber_loss_backward.default),
        _of(_contiguous, _aten.log_sigmoid_forward.default),
        _of(_contiguous, _aten._log_softmax_backward_data.default),
        _of(_like_input, _aten.col2im.default),
        _of(_like_input, _aten.im2col.default),
        _of(_embedding_bag, _aten._embedding_bag.default),
        _of(_rnn_layer, _aten.mkldnn_rnn_layer.default),
        _of(_rnn_layer_backward, _aten.mkldnn_rnn_layer_backward.default),
    )
)
"""What gives the results of these operations, with the memory that the real ones have."""
