"""The tensors in what a function is given or returns, and their storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._containers import contents_of
from tenure._storages import sparse_parts


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors in containers of any kind, each once, in order."""
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}
    waiting = [*values][::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif id(value) not in seen:
            seen[id(value)] = value
            waiting += contents_of(value)[::-1]
    return list(found.values())


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages of a tensor of any layout, with data or without."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return [part.untyped_storage() for _, part in sparse_parts(tensor)]
