"""Operators that torch calls by another name on a PrivateUse1 device than on the CPU.

Convolution has `_overrideable` entry points, which are given the arithmetic of their CPU
counterparts. Recurrent cells have fused ones that no CPU kernel backs; they run as the operators
that a cell is made of, and so stand for the cells under autograd as well. Attention takes torch's
math path.
"""

import functools
from typing import Any

import torch

from .._torch_backend import kernel
from ._fallback import run_on_host

_aten = torch.ops.aten
# at::SDPBackend::math.
_SDP_MATH = 0
_UNDER_AUTOGRAD = "PrivateUse1", "AutogradPrivateUse1"

kernel("convolution_overrideable")(functools.partial(run_on_host, _aten.convolution.default))


@kernel("convolution_backward_overrideable")
def convolution_backward(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *geometry: Any
) -> Any:
    """Give the operator of the host the size of the bias, which this one has not."""
    *_, output_mask = geometry
    bias_size = [grad.shape[1]] if output_mask[2] else None
    operator = _aten.convolution_backward.default
    return run_on_host(operator, grad, inputs, weight, bias_size, *geometry)


@kernel("_fused_sdp_choice")
def choose_attention(*args: Any, **kwargs: Any) -> int:
    """Choose the only path that there is."""
    return _SDP_MATH


@kernel("_thnn_fused_lstm_cell", keys=_UNDER_AUTOGRAD)
def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the cell of an LSTM."""
    gates = _add_all(input_gates, input_bias, hidden_gates, hidden_bias)
    enter, forget, candidate, leave = gates.chunk(4, 1)
    new_cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * new_cell.tanh(), new_cell, gates


@kernel("_thnn_fused_gru_cell", keys=_UNDER_AUTOGRAD)
def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the cell of a GRU."""
    reset_in, update_in, new_in = _add_all(input_gates, input_bias).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _add_all(hidden_gates, hidden_bias).chunk(3, 1)
    new = (new_in + (reset_in + reset_hidden).sigmoid() * new_hidden).tanh()
    return new + (update_in + update_hidden).sigmoid() * (hidden - new), new


def _add_all(*addends: torch.Tensor | None) -> torch.Tensor:
    return functools.reduce(torch.add, [each for each in addends if each is not None])
