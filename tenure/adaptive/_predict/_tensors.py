"""The tensors in what a function is given or returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tenure._containers import contents_of


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
