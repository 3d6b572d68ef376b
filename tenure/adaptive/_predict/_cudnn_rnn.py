"""The memory of recurrent layers on CUDA, which torch's kernels for fake tensors do not know.

The reserve, which a forward pass keeps for its backward pass, is exactly as large as cuDNN 9 made
it on an H100 for LSTM and GRU in float32. For large layers the working memory is within a few
percent of the measured one. On another GPU cuDNN may choose different kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._cuda_blocks import BLOCK_BYTES, MIB

_aten = torch.ops.aten
# by the modes of cuDNN: RNN with relu and with tanh, LSTM, GRU
_KEPT = (1, 1, 5, 6)
"""How many values the reserve keeps for each value of the states."""
_AT_WORK = (4.2, 4.2, 5.6, 4.6)
"""How many values the working memory has for each value of the states."""
_WORK_BYTES = 8 * MIB
"""The least working memory of each layer and direction."""


class _Layers(NamedTuple):
    """The arguments that both kernels have, from ``mode`` on."""

    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: list[int]

    @property
    def n_directions(self) -> int:
        return 2 if self.bidirectional else 1

    def states_bytes(self, x: Tensor) -> int:
        """Return the bytes of the states of one layer at all times, in both directions."""
        n_rows = x.numel() // x.shape[-1]
        return self.n_directions * n_rows * self.hidden_size * x.element_size()

    def reserve_bytes(self, x: Tensor) -> int:
        if not self.train:
            return 0
        between = self.num_layers - 1
        states = self.num_layers * (_KEPT[self.mode] + 2 * bool(self.proj_size)) + between
        if self.proj_size:
            states -= between
        # a bit for each value that is dropped or not
        mask_bytes = between * self.states_bytes(x) // x.element_size() // 8
        return states * self.states_bytes(x) + bool(self.dropout) * mask_bytes + BLOCK_BYTES

    def work_bytes(self, x: Tensor, weight: list[Tensor]) -> int:
        weight_bytes = sum(each.numel() * each.element_size() for each in weight)
        least_bytes = _WORK_BYTES * self.num_layers * self.n_directions
        return int(_AT_WORK[self.mode] * self.states_bytes(x)) + weight_bytes + least_bytes


def rnn(*args: Any) -> tuple[Tensor, ...]:
    """Return the results of ``_cudnn_rnn``, with the reserve that the kernel makes."""
    output, hy, cy, reserve, weight_buf = _aten._cudnn_rnn.default(*args)
    n_bytes = _Layers(*args[6:15]).reserve_bytes(args[0])
    return output, hy, cy, reserve.new_empty(n_bytes), weight_buf


def rnn_backward(*args: Any) -> tuple[Any, ...]:
    """Return the results of ``_cudnn_rnn_backward``: the gradients of weights lie in one block."""
    x, weight, hx, cx, mask = args[0], args[1], args[4], args[5], args[21]
    grad_x = torch.empty_like(x) if mask[0] else None
    grad_hx = torch.empty_like(hx) if mask[1] else None
    grad_cx = torch.empty_like(cx) if mask[2] and cx is not None else None
    if not mask[3]:
        return grad_x, grad_hx, grad_cx, []
    whole = weight[0].new_empty(sum(each.numel() for each in weight))
    parts = whole.split([each.numel() for each in weight])
    grads = [part.view(each.shape) for part, each in zip(parts, weight, strict=True)]
    return grad_x, grad_hx, grad_cx, grads


def work_bytes(func: Any, args: Any) -> tuple[int, ...]:
    """Return a kernel's own bytes: cuDNN's workspace and transposed copies."""
    is_backward = func is _aten._cudnn_rnn_backward.default
    layers = _Layers(*(args[10:19] if is_backward else args[6:15]))
    sizes = [layers.work_bytes(args[0], args[1])]
    if layers.batch_first:
        transposed = [args[0], args[7]] if is_backward else [args[0]]
        sizes += [each.numel() * each.element_size() for each in transposed if each is not None]
    return tuple(sizes)


KERNELS = {_aten._cudnn_rnn.default: rnn, _aten._cudnn_rnn_backward.default: rnn_backward}
