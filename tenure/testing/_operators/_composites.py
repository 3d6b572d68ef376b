"""Operators that torch calls by another name on a PrivateUse1 device than on the CPU.

Convolution has `_overrideable` entry points, which are given the arithmetic of their CPU
counterparts. Recurrent cells have fused ones that no CPU kernel backs; they run as the operators
that a cell is made of. Attention takes torch's math path.
"""

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
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *geometry: Any
) -> Any:
    """Kernel of `aten::convolution_backward_overrideable`."""
    *_, output_mask = geometry
    bias_size = [grad.shape[1]] if output_mask[2] else None
    operator = _aten.convolution_backward.default
    return run_as(operator, operator, (grad, inputs, weight, bias_size, *geometry), {})


@kernel
def choose_attention(*args: Any, **kwargs: Any) -> int:
    """Kernel of `aten::_fused_sdp_choice`."""
    return _SDP_MATH


@kernel
def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Kernel of `aten::_thnn_fused_lstm_cell`."""
    gates = _add_all(input_gates, input_bias, hidden_gates, hidden_bias)
    enter, forget, candidate, leave = gates.chunk(4, 1)
    new_cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * new_cell.tanh(), new_cell, gates


@kernel
def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel of `aten::_thnn_fused_gru_cell`."""
    reset_in, update_in, new_in = _add_all(input_gates, input_bias).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _add_all(hidden_gates, hidden_bias).chunk(3, 1)
    new = (new_in + (reset_in + reset_hidden).sigmoid() * new_hidden).tanh()
    return new + (update_in + update_hidden).sigmoid() * (hidden - new), new


def _add_all(first: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    total = first
    for other in others:
        total = total if other is None else total + other
    return total


CELLS = {"_thnn_fused_lstm_cell": lstm_cell, "_thnn_fused_gru_cell": gru_cell}
"""Of operators that have gradients: these stand for the cells under autograd as well."""
KERNELS = {
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
    "_fused_sdp_choice": choose_attention,
    **CELLS,
}
