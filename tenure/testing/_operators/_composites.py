"""Operators that torch calls by another name on a PrivateUse1 device than on the CPU.

Convolution has `_overrideable` entry points, recurrent cells have fused ones that no CPU kernel
backs; each is given the arithmetic of its CPU counterpart. Attention takes torch's math path.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .._torch_backend import kernel, operator_named
from ._fallback import run_as

_aten = torch.ops.aten
# at::SDPBackend::math.
_SDP_MATH = 0


@kernel
def convolution(*args: Any) -> Any:
    """Kernel of `aten::convolution_overrideable`."""
    operator = operator_named("convolution_overrideable")
    return run_as(operator, _aten.convolution.default, args, {})


@kernel
def convolution_backward(
    grad: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Kernel of `aten::convolution_backward_overrideable`."""
    bias_size = [grad.shape[1]] if output_mask[2] else None
    geometry = (stride, padding, dilation, transposed, output_padding, groups, output_mask)
    operator = _aten.convolution_backward.default
    return run_as(operator, operator, (grad, inputs, weight, bias_size, *geometry), {})


@kernel
def choose_attention(*args: Any, **kwargs: Any) -> int:
    """Kernel of `aten::_fused_sdp_choice`."""
    return _SDP_MATH


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = _add_all(input_gates, input_bias, hidden_gates, hidden_bias)
    enter, forget, candidate, leave = gates.chunk(4, 1)
    new_cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * new_cell.tanh(), new_cell, gates


def _lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_new_cell: torch.Tensor | None,
    cell: torch.Tensor,
    new_cell: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if grad_hidden is None and grad_new_cell is None:
        return None, None, None
    others = torch.zeros_like(gates), None, None, cell, new_cell
    backward = _aten._thnn_differentiable_lstm_cell_backward.default
    grads = backward(grad_hidden, grad_new_cell, gates, *others)
    return grads[0], grads[2], grads[0].sum(0) if has_bias else None


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    reset_in, update_in, new_in = _add_all(input_gates, input_bias).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _add_all(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = reset_in + reset_hidden, update_in + update_hidden
    new = (new_in + reset.sigmoid() * new_hidden).tanh()
    workspace = torch.cat([reset, update, new_in, hidden, new_hidden], 1)
    return new + update.sigmoid() * (hidden - new), workspace


def _gru_cell_backward(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    reset, update, new_in, hidden, new_hidden = workspace.chunk(5, 1)
    none = torch.zeros_like(reset)
    input_gates = torch.cat([reset, update, new_in], 1)
    hidden_gates = torch.cat([none, none, new_hidden], 1)
    backward = _aten._thnn_differentiable_gru_cell_backward.default
    grads = backward(grad, input_gates, hidden_gates, hidden, None, None)
    grad_input, grad_hidden, grad_before = grads[:3]
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return (grad_input, grad_hidden, grad_before, *biases)


def _add_all(first: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    total = first
    for other in others:
        total = total if other is None else total + other
    return total


_CELLS = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


def _cell_kernel(name: str) -> Any:
    operator = operator_named(name)

    @kernel
    def cell(*args: Any) -> Any:
        return run_as(operator, _CELLS[name], args, {})

    return cell


KERNELS = {
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
    "_fused_sdp_choice": choose_attention,
} | {name: _cell_kernel(name) for name in _CELLS}
