"""A function in a scope of its own, or a block or function in none.

What a scoped function returns moves to its caller's scope, which is open from call to return.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar, overload

from tenure._callers import Capture
from tenure._errors import ScopeUsageError
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

from ._scope import DisposeScope, OnError, Policy
from ._tracker import current
from ._trees import tensors_in

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def scoped(function: Function, /) -> Function: ...
@overload
def scoped(
    *,
    name: str | None = None,
    policy: Policy = "dispose",
    on_error: OnError = "dispose",
    capture: Capture | None = None,
) -> Callable[[Function], Function]: ...
def scoped(function: Any = None, /, **options: Any) -> Any:
    """Run a function in a scope of its own; what it returns moves to its caller's scope.

    Args:
        function: a function, method or coroutine function.
        **options: ``name`` (default: that of the function), ``policy``, ``on_error`` and
            ``capture``, as of NewDisposeScope.

    Raises:
        ScopeUsageError: it decorates something else, such as a class, a classmethod object or a
            generator function.

    Example:
        >>> import torch
        >>> from tenure import scoped
        >>> @scoped
        ... def normalized(x: torch.Tensor) -> torch.Tensor:
        ...     centred = x - x.mean()
        ...     return centred / centred.norm()
        >>> normalized(torch.tensor([1.0, 3.0]))
        tensor([-0.7071,  0.7071])

    Source: ``WrappedTensorDisposeScope`` of TorchSharp, and ``tf.tidy`` of TensorFlow.js.
    """
    if function is None:
        return functools.partial(scoped, **options)
    if not callable(function) or isinstance(function, type):
        raise ScopeUsageError(
            f"@scoped got {function!r}, which is no function. Decorate the function itself, below "
            "@classmethod or @staticmethod."
        )
    named = {"name": getattr(function, "__qualname__", type(function).__name__), **options}
    # wrong options fail here and not at the first call
    DisposeScope(**named)
    opener = functools.partial(DisposeScope, **named)

    def is_kind(question: Callable[[Any], bool]) -> bool:
        # an object with __call__
        return question(function) or question(type(function).__call__)

    if is_kind(inspect.isgeneratorfunction) or is_kind(inspect.isasyncgenfunction):
        raise ScopeUsageError(
            f"@scoped got the generator function {function!r}, which it does not take. Decorate "
            "the function that makes each item, or open a scope around that."
        )
    if is_kind(inspect.iscoroutinefunction):

        @functools.wraps(function)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            call: Any = function
            with opener() as scope:
                return _handed_over(scope, await call(*args, **kwargs))

        return run_coroutine

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        with opener() as scope:
            return _handed_over(scope, function(*args, **kwargs))

    return run


@never_compiled
def _handed_over(scope: DisposeScope, result: Any) -> Any:
    """Move the tensors of a result to the scope of the caller, and return it."""
    scope._hand(tensors_in((result,)), scope.outer)
    return result


# --- in none


class persist(ContextDecorator):
    """A block, or with ``@persist()`` a function, in which no scope takes what is made.

    A scope opened inside has no outer scope. May be nested, and entered again; one object is for
    one thread or task at a time.

    Raises:
        ScopeUsageError: it was given an argument, as ``@persist`` without parentheses gives it one.

    Example:
        >>> import torch
        >>> from tenure import NewDisposeScope, persist
        >>> cache = {}
        >>> with NewDisposeScope():
        ...     with persist():
        ...         cache["mask"] = torch.ones(2)
        >>> cache["mask"].sum().item()
        2.0

    Source: ``scopeOutOfWorkspaces`` of ND4J.
    """

    def __init__(self, function: None = None) -> None:
        if function is not None:
            raise ScopeUsageError(
                f"persist() takes no argument and got {function!r}. Write @persist() above a "
                "function, with its parentheses, or `with persist():`."
            )
        self._left: list[DisposeScope | None] = []

    @never_compiled
    def __enter__(self) -> None:
        """Leave the current scope."""
        if not is_dynamo_compiling():
            self._left.append(current.get())
            current.set(None)

    @never_compiled
    def __exit__(self, *_: object) -> None:
        """Return to it."""
        if not is_dynamo_compiling():
            current.set(self._left.pop())

    def _recreate_cm(self) -> persist:
        # a decorated function may run on several threads at once
        return persist()
