"""The Python modules that code is from: it may use variables there that no other search finds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
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
    # without calls for each object: a step asks for all variables of the user's files
    for each in objects:
        kind = type(each)
        value = each.__wrapped__ if kind is CACHE else each
        if type(value) is FunctionType or type(value) is MethodType:
            names.append(value.__module__)
        elif kind is ModuleType:
            names.append(each.__name__)
        elif issubclass(kind, nn.Module):
            names += [cls.__module__ for cls in kind.__mro__]
    found = {name for name in names if type(name) is str and name in sys.modules}
    return {name for name in found if name.partition(".")[0] not in _LIBRARIES}


def variables_of(homes: Iterable[str]) -> list[dict[str, Any]]:
    """Return the variables of Python modules."""
    return [vars(sys.modules[name]) for name in sorted(homes)]


def helpers_of(homes: set[str]) -> set[str]:
    """Return the Python modules that others import, or import a function from."""
    return homes_of(chain(*[list(space.values()) for space in variables_of(homes)])) - homes


def used_variables(objects: Iterable[Any]) -> Iterator[Any]:
    """Return the values of variables that the code of modules and functions may use."""
    homes = homes_of(objects)
    spaces = variables_of(homes | helpers_of(homes))
    return chain(*[list(space.values()) for space in spaces])


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
