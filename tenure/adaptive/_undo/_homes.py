"""The Python modules that code is from: it may use variables there that no other search finds."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "tenure"}
"""Their variables hold nothing that a model keeps for itself."""
CACHE = type(functools.lru_cache(len))
_module_of = operator.attrgetter("__module__")


def homes_of(objects: Iterable[Any]) -> set[str]:
    """Return the names of the Python modules that define modules, functions and caches."""
    names: list[Any] = []
    kinds: set[type] = set()
    # a loop without calls: a step asks for all variables of the user's files
    for each in objects:
        kind = type(each)
        if kind is CACHE:
            each = each.__wrapped__
            kind = FunctionType if is_a(each, FunctionType, MethodType) else CACHE
        if kind is FunctionType or kind is MethodType:
            names.append(each.__module__)
        elif kind is ModuleType:
            names.append(each.__name__)
        else:
            kinds.add(kind)
    for kind in kinds:
        if issubclass(kind, nn.Module):
            names += map(_module_of, kind.__mro__)
    found: set[str] = set()
    for name in names:
        if type(name) is str and name in sys.modules and name.partition(".")[0] not in _LIBRARIES:
            found.add(name)
    return found


def variables_of(homes: Iterable[str]) -> list[dict[str, Any]]:
    """Return the variables of Python modules."""
    return [vars(sys.modules[name]) for name in sorted(homes)]


def used_variables(objects: Iterable[Any]) -> list[Any]:
    """Return the values of variables that the code of modules and functions may use.

    Those are variables of the Python modules that they are from, and of those that these import, or
    import a function from.
    """
    values: list[Any] = []
    known: set[str] = set()
    for found in (objects, values):
        homes = homes_of(found) - known
        known |= homes
        for name in sorted(homes):
            # at once: another thread may set a variable meanwhile
            values += vars(sys.modules[name]).values()
    return values


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
