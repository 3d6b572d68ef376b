"""The Python modules that code is from: it may use variables there that no other search finds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "tenure"}
"""Their variables hold nothing that a model keeps for itself."""
CACHE = type(functools.lru_cache(len))


def homes_of(objects: Iterable[Any]) -> set[str]:
    """The names of the Python modules that modules, functions and caches of functions are from."""
    objects = [*objects]
    classes = {type(each) for each in objects if is_a(each, nn.Module)}
    found = {home_of(kind) for cls in classes for kind in cls.__mro__}
    for each in objects:
        value = each.__wrapped__ if type(each) is CACHE else each
        if type(value) in (FunctionType, MethodType):
            found.add(home_of(value))
        elif type(value) is ModuleType:
            found.add(str(value.__name__))
    return {name for name in found if name in sys.modules and not is_library(name)}


def variables_of(homes: Iterable[str]) -> list[dict[str, Any]]:
    """The variables of Python modules."""
    return [vars(sys.modules[name]) for name in sorted(homes)]


def helpers_of(homes: set[str]) -> set[str]:
    """The Python modules that others import, or import a function from."""
    return homes_of(each for space in variables_of(homes) for each in list(space.values())) - homes


def used_variables(objects: Iterable[Any]) -> Iterator[Any]:
    """The values of variables that the code of modules and functions may use."""
    homes = homes_of(objects)
    for space in variables_of(homes | helpers_of(homes)):
        yield from list(space.values())


def home_of(value: Any) -> str:
    """The name of the Python module that a class or a function is from."""
    name = value.__module__
    return name if type(name) is str else ""


def is_library(name: str) -> bool:
    """Whether a Python module keeps nothing of a model in its variables."""
    return name.partition(".")[0] in _LIBRARIES


def is_a(value: object, *kinds: type) -> bool:
    """As `isinstance`, which asks a weak proxy; and one of nothing raises."""
    return issubclass(type(value), kinds)
