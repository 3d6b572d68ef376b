"""Stepping out of all scopes for what must outlive them: caches, lazily built state."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TYPE_CHECKING

from tenure._errors import ScopeUsageError
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

from ._tracker import current

if TYPE_CHECKING:
    from ._block import Block


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
        self._left: list[Block | None] = []

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
        return persist()  # a decorated function may run on several threads at once
