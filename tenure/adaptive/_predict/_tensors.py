"""The tensors in what a function or an operation is given or returns, and their storages.

`tensors_in` goes through what people make containers of; `tensors_of` through what torch passes to
its operations, which is asked at each of them, and can't lead back to itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._containers import contents_of
from tenure._storages import sparse_parts


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors in containers of any kind that a function has to do with, each once, in order."""
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
