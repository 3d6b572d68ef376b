"""torch's version counters: writing values back so that no graph takes it for a change.

A graph refuses its backward pass when a tensor that it saved has another version than then. Values
that are put back exactly as they were deserve the version that they had.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor of any kind was written to; None for inference tensors, uncounted."""
    return None if tensor.is_inference() else tensor._version


def write_back(tensor: Tensor, values: Tensor, version: int | None) -> None:
    """Copy values into a tensor that had them when its version was ``version``.

    Source: ``torch.autograd._unsafe_preserve_version_counter``, for a version of the caller's.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)
    if version is not None:
        _C._autograd._unsafe_set_version_counter((tensor,), (version,))


def works() -> bool:
    """Whether a backward pass accepts a saved tensor that was changed and written back."""
    weight = torch.ones(2, requires_grad=True)
    buffer = torch.tensor([2.0, 3.0])
    before, version = buffer.clone(), version_of(buffer)
    result = (weight * buffer).sum()
    buffer.zero_()
    write_back(buffer, before, version)
    result.backward()
    return weight.grad is not None and weight.grad.tolist() == [2.0, 3.0]
