"""Descriptions of functions, which differ if the losses may: the code, and what it captures.

Invariant: a description holds no function, no model and no tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tenure.scopes import is_disposed

from ..._reachable import is_of_a_library, names_in, used_by

_MAX_DEPTH = 4
_MAX_ITEMS = 32


class Captured:
    """Descriptions of values, and the numbers that stand in them.

    Attributes:
        numbers: the numbers, in order; values that are described alike have as many.
    """

    def __init__(self) -> None:
        self.numbers: list[Any] = []

    def description_of(self, value: Any, attributes: frozenset[str], depth: int) -> Hashable:
        """Describe a value so that one with another loss differs, apart from its numbers.

        Args:
            value: anything.
            attributes: the names of attributes that the code around it reads.
            depth: how many values it stands in.
        """
        if value is None or isinstance(value, bool | str | bytes | torch.dtype):
            return value
        number = _number(value)
        if number is not None:
            self.numbers.append(number)
        if isinstance(value, Tensor):
            kind = () if is_disposed(value) else (value.dtype, value.dim())
            return "Tensor", number is None, *kind
        # by identity: another model of the same class may have another criterion
        if isinstance(value, nn.Module):
            return identity_of(value), tuple(self._plain_attributes(value))
        is_container = isinstance(value, list | tuple | dict)
        # what stands deeper changes no loss that was seen so far
        if depth >= _MAX_DEPTH or (number is not None and not is_container):
            return type(value).__name__
        children = _children(value, attributes)
        return _named(value), *(
            (name, self.description_of(child, names, depth + 1)) for name, child, names in children
        )

    def _plain_attributes(self, module: nn.Module) -> Iterator[tuple[str, Hashable]]:
        """How a criterion is set; a model's own settings cost little."""
        for name, value in vars(module).items():
            kind = type(value)
            if _is_plain(value) and name != "training":
                yield name, self.description_of(value, frozenset(), 0)
            elif issubclass(kind, dict | list | tuple) and value:
                self.numbers.append(_number(value))
                yield name, kind.__name__
            elif issubclass(kind, Tensor) and not is_disposed(value):
                yield name, value.dim()
        for name, buffer in module._buffers.items():
            yield name, buffer is None


def _number(value: Any) -> Any:
    """A number, or the numbers that stand in a container; None for anything else.

    Those of a container are one, so that a history, which grows, makes no other place.
    """
    if isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple):
        return tuple(each for each in value[:_MAX_ITEMS] if isinstance(each, int | float))
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return tuple((str(key), each) for key, each in items if _is_plain(key) and _is_plain(each))
    # one of NumPy, or a tensor that no device has to be waited for
    is_array = hasattr(type(value), "__array_interface__") and value.size == 1
    is_ready = type(value) is Tensor and not value.requires_grad and value.device.type == "cpu"
    if is_array or (is_ready and not value.dim() and value.layout is torch.strided):
        return value.item()
    return None


def _children(value: Any, attributes: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    if isinstance(value, functools.partial):
        yield "function", value.func, attributes
        yield from ((str(i), child, attributes) for i, child in enumerate(value.args))
        yield from ((name, child, attributes) for name, child in value.keywords.items())
    elif isinstance(value, MethodType):
        yield "function", value.__func__, attributes
        code = getattr(value.__func__, "__code__", None)
        yield "self", value.__self__, names_in(code).attributes if code else attributes
    elif isinstance(value, FunctionType):
        names = names_in(value.__code__).attributes
        yield from ((name, child, names) for name, child in used_by(value))
    elif isinstance(value, list | tuple):
        items = enumerate(value[:_MAX_ITEMS])
        yield from ((str(i), child, attributes) for i, child in items if callable(child))
    elif isinstance(value, dict):
        named = list(value.items())[:_MAX_ITEMS]
        told = ((key, child) for key, child in named if callable(child) or isinstance(child, str))
        yield from ((repr(key), child, attributes) for key, child in told)
    elif isinstance(value, ModuleType | type):
        # settings that stand in a file or in a class of the user's
        held = {} if is_of_a_library(_module_name(value)) else vars(value)
        plain = ((name, held[name]) for name in sorted(attributes & held.keys()))
        yield from ((name, child, attributes) for name, child in plain if _is_plain(child))
    else:
        held = getattr(value, "__dict__", {})
        yield from ((name, held[name], attributes) for name in sorted(attributes & held.keys()))


def _module_name(value: Any) -> str | None:
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


def _is_plain(value: Any) -> bool:
    # a weak proxy of nothing raises where isinstance() asks it
    return issubclass(type(value), bool | str | int | float)


def _named(value: Any) -> Hashable:
    """A function by its code, so that a new closure of the same code counts on."""
    if isinstance(value, FunctionType):
        return identity_of(value.__code__)
    if isinstance(value, MethodType | functools.partial | list | tuple | dict):
        return type(value).__name__
    if isinstance(value, type | ModuleType):
        return value.__name__
    return identity_of(value)


class _Identity:
    """An object by identity, without keeping it; what took its place in memory is another."""

    __slots__ = ("_id", "_reference")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        self._reference = weakref.ref(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Identity)
            and self._id == other._id
            and self._reference() is not None
            and self._reference() is other._reference()
        )


def identity_of(value: Any) -> Hashable:
    """An object by identity, or by its type where it allows no weak reference."""
    if isinstance(value, CodeType) or type(value).__weakrefoffset__:
        return _Identity(value)
    return type(value).__qualname__
