"""The slots of functions and what wraps them: closures, defaults, methods, partials, caches.

A chain starts anew at a callable, because its own name says more than the way to it.
"""

import functools
import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

from .._static import class_attributes, is_kind, type_name
from .._words import Namer, Slot, Step, Wanted, items, variables

_NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def function_slots(holder: types.FunctionType, wanted: Wanted) -> Iterator[Slot]:
    """Captured variables and defaults."""
    code, name = holder.__code__, holder.__qualname__
    yield holder.__closure__, _anchored("closure", name, variables(code.co_freevars))
    first = code.co_argcount - len(holder.__defaults__ or ())
    names = code.co_varnames[first : code.co_argcount]
    yield holder.__defaults__, _anchored("default", name, variables(names))
    yield holder.__kwdefaults__, _anchored("default", name, variables(()))


def cell_slots(holder: types.CellType, wanted: Wanted) -> Iterator[Slot]:
    """The value of a captured variable."""
    yield holder.cell_contents, Step("", "closure")


def method_slots(
    holder: types.MethodType | types.BuiltinMethodType, wanted: Wanted
) -> Iterator[Slot]:
    """The object that a method is bound to."""
    of_self = holder.__self__
    if is_kind(type(of_self), torch.Tensor):
        yield of_self, Step("", "method", anchor="bound method", link=" ")
    else:
        anchor = type_name(type(of_self))
        yield of_self, Step("", "method", anchor=anchor, link=", held by the bound method ")


def partial_slots(holder: "functools.partial[object]", wanted: Wanted) -> Iterator[Slot]:
    """Arguments and function of a `functools.partial`."""
    func, args, keywords = (
        class_attributes(functools.partial)[name].__get__(holder)  # type: ignore[attr-defined]
        for name in ("func", "args", "keywords")
    )
    anchor = f"partial of {_name_of(func)}"
    yield args, Step("", "partial", anchor=anchor, namer=items("args"))
    yield keywords, Step("", "partial", anchor=anchor, namer=items("keywords"))
    yield func, Step(": func", "partial", anchor=anchor)


def cache_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    """Arguments and results that a `functools.lru_cache` remembers."""
    wrapped = object.__getattribute__(holder, "__wrapped__")
    step = Step("", "cache", anchor=f"lru_cache of {_name_of(wrapped)}")
    return ((value, step) for value in gc.get_referents(holder) if value is not wrapped)


def _anchored(kind: str, name: str, namer: Namer) -> Step:
    return Step("", kind, anchor=f"{kind} of {name}", namer=namer)


def _name_of(func: Any) -> str:
    return str(func.__qualname__) if is_kind(type(func), *_NAMED) else type_name(type(func))
