"""What can be tried again: a function that runs from its call to its return."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Container
from typing import Any

from tenure._errors import AdaptiveUsageError

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_KINDS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)

_LAMBDA = "<lambda>"


def check_function(entry: str, function: object) -> None:
    """Make sure that what is tried again runs from its call to its return.

    Raises:
        AdaptiveUsageError: it is no function, or one that can be suspended.
    """
    if not callable(function):
        raise AdaptiveUsageError(f"{entry} wants a function, and got {function!r}.")
    if is_suspendable(function):
        raise AdaptiveUsageError(
            f"{entry} got {name_of(function)}(), which can be suspended: it would run out of "
            "memory after the call, where nothing tries again. Use it inside a plain function that "
            "runs it to its end."
        )


def name_of(function: Any) -> str:
    """Return the qualified name of a function, for errors and events."""
    function = _unwrapped(function)
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def told_apart(function: Any) -> str:
    """Return the qualified name of a function, and of a lambda its line too."""
    name = name_of(function)
    code = getattr(_unwrapped(function), "__code__", None)
    # several of one function have the same name
    return f"{name}:{code.co_firstlineno}" if code is not None and _LAMBDA in name else name


def short_name_of(function: Any) -> str:
    """Return the name alone, for functions that are written where they are used."""
    function = _unwrapped(function)
    return str(getattr(function, "__name__", None) or type(function).__name__)


def unused(name: str, known: Container[str]) -> str:
    """Return a name, with a number if it is known already."""
    if name not in known:
        return name
    return next(each for i in itertools.count(2) if (each := f"{name} ({i})") not in known)


def is_suspendable(function: Callable[..., object]) -> bool:
    """Return whether a call gives a generator or a coroutine, which has not run yet."""
    code = getattr(function, "__code__", None)
    # by far the most
    if code is not None and not code.co_flags & _SUSPENDABLE:
        return False
    function = _unwrapped(function)
    called = (function, type(function).__call__)
    return any(is_kind(one) for is_kind in _KINDS for one in called)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
