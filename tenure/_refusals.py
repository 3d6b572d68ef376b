"""What a handle that refuses its use has to know of the call: its name, and who else was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def handles_in(values: Iterable[object], cls: type[Tensor]) -> Iterator[Tensor]:
    """The tensors of exactly ``cls`` in a call, one by one: behind one may stand half-made objects.

    ``copy.deepcopy`` for one passes its memo along, with all that it has copied so far.
    """
    for value in values:
        if type(value) is cls:
            yield value
        elif isinstance(value, list | tuple):
            yield from handles_in(value, cls)
        elif isinstance(value, Mapping):
            yield from handles_in(value.values(), cls)


def operation_of(func: Callable[..., Any]) -> str:
    """How an error calls a function of torch: ``exp()``, ``add()`` for an operator, ``.grad``."""
    name: str = getattr(func, "__name__", None) or type(func).__name__
    if name in {"__get__", "__set__", "__delete__"}:
        return f".{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return f"{_unwrapped(name)}()"


def _unwrapped(name: str) -> str:
    return name.removeprefix("__").removesuffix("__") if name.startswith("__") else name
