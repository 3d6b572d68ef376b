"""Which host tensors an operation on the device accepts: those that CUDA accepts, no others.

A 0-dim host tensor counts as a number. A few operators take certain arguments on the host; all else
raises as on CUDA.
"""

from typing import NoReturn

import torch

_ON_HOST = {
    ("aten::index", "indices"),
    ("aten::_unsafe_index", "indices"),
    ("aten::index_put", "indices"),
    ("aten::index_put_", "indices"),
    ("aten::_index_put_impl_", "indices"),
    ("aten::_unsafe_index_put", "indices"),
    ("aten::_pack_padded_sequence", "lengths"),
    ("aten::_pack_padded_sequence_backward", "batch_sizes"),
    ("aten::_pad_packed_sequence", "batch_sizes"),
    ("aten::_ctc_loss", "input_lengths"),
    ("aten::_ctc_loss", "target_lengths"),
}

# Outputs that stay on the host, by position.
HOST_OUTPUTS = {"aten::_pack_padded_sequence": {1}}


def check_host_tensor(
    tensor: torch.Tensor,
    operator: str,
    argument: str,
    device: torch.device,
    *,
    is_write: bool,
) -> None:
    """Refuse a host tensor among device tensors, with the words of CUDA's error.

    Raises:
        RuntimeError: neither a number nor an argument that this operator takes on the host.
    """
    if (operator, argument) in _ON_HOST or (tensor.dim() == 0 and not is_write):
        return
    refuse_mixing(device, tensor.device, operator, argument)


def refuse_mixing(
    first: torch.device, other: torch.device, operator: str, argument: str
) -> NoReturn:
    """Raise as CUDA does where the tensors of an operation lie on two devices."""
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices,"
        f" {first} and {other}! (when checking argument {argument} in method {operator})"
    )
