"""The tensors that an operation is given or returns, and the storages of a tensor.

Of what people make containers of, `tenure._containers.tensors_in` has the tensors. Here it is what
torch passes to its operations, which is asked at each of them, and can't lead back to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._storages import sparse_parts


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, as often as they are there."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of(list(values.values()))


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages of a tensor of any layout, with data or without."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return [part.untyped_storage() for _, part in sparse_parts(tensor)]
