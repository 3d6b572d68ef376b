"""The Python modules that code is from: it may use variables there that no other search finds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "tenure"}
"""Their variables hold nothing that a model keeps for itself."""
CACHE = type(functools.lru_cache(len))


def homes_of(objects: Iterable[Any]) -> set[str]:
    """Return the names of the Python modules that define modules, functions and caches."""
    names: list[Any] = []
    # a step asks for all variables of the user's files, which are of a few types
    by_kind: dict[int, list[Any]] = {}
    for each in objects:
        by_kind.setdefault(id(type(each)), []).append(each)
    for alike in by_kind.values():
        kind = type(alike[0])
        if kind is FunctionType or kind is MethodType:
            names += [each.__module__ for each in alike]
        elif kind is CACHE:
            functions = [each.__wrapped__ for each in alike]
            names += [each.__module__ for each in functions if is_a(each, FunctionType, MethodType)]
        elif kind is ModuleType:
            names += [each.__name__ for each in alike]
        elif issubclass(kind, nn.Module):
            names += [cls.__module__ for cls in kind.__mro__]
    found = {name for name in names if type(name) is str}
    return {n for n in found if n in sys.modules and n.partition(".")[0] not in _LIBRARIES}


def variables_of(homes: Iterable[str]) -> list[dict[str, Any]]:
    """Return the variables of Python modules."""
    return [vars(sys.modules[name]) for name in sorted(homes)]


def helpers_of(homes: set[str]) -> set[str]:
    """Return the Python modules that others import, or import a function from."""
    return homes_of(_values_in(homes)) - homes


def used_variables(objects: Iterable[Any]) -> list[Any]:
    """Return the values of variables that the code of modules and functions may use."""
    homes = homes_of(objects)
    values = _values_in(homes)
    return values + _values_in(homes_of(values) - homes)


def _values_in(homes: set[str]) -> list[Any]:
    # a list of each: another thread may set a variable meanwhile
    return [*chain(*[list(space.values()) for space in variables_of(homes)])]


def home_of(value: Any) -> str:
    """Return the name of the Python module that a class or a function is from."""
    name = value.__module__
    return name if type(name) is str else ""


def is_library(name: str) -> bool:
    """Return whether a Python module keeps nothing of a model in its variables."""
    return name.partition(".")[0] in _LIBRARIES


def is_a(value: object, *kinds: type) -> bool:
    """Return `isinstance` by type, because a dead weak proxy raises."""
    return issubclass(type(value), kinds)
