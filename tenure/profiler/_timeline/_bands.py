"""The scopes that were open, and when, on one thread.

Invariant: a span begins when its scope becomes the current one and ends when it gives way, so a
generator's scope has one for each time that it ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

from tenure._registries import scope_watchers
from tenure.scopes import current_scope

from ._timeline_report import OUTSIDE, ScopeSpan

# of more the longest are kept
_MOST_SPANS = 4096
_NS = 1e9


class Bands:
    """The scopes of the thread that opens it.

    Args:
        step: called where a band begins and ends.

    Attributes:
        spans: those that have ended.
        n_dropped: how many short ones were left out.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self.spans: list[ScopeSpan] = []
        self.n_dropped = 0
        self._began_ns = 0
        self._step = step
        # by the identity of the scope: its name, the depth, and when it began
        self._open: dict[int, tuple[str, int, float]] = {}
        self._thread = get_ident()

    def open(self, began_ns: int) -> None:
        """Begin with the scopes that are open now, at a time of ``time.perf_counter_ns()``."""
        self._began_ns = began_ns
        scope: Any = current_scope()
        around = []
        while scope is not None:
            around.append(scope)
            scope = scope.outer
        for scope in reversed(around):
            self._enter(scope, 0.0)
        scope_watchers.append(self)

    def close(self) -> None:
        """End all spans."""
        if self in scope_watchers:
            scope_watchers.remove(self)
        for identity in [*self._open]:
            self._leave(identity)

    def current(self) -> str:
        """Return the name of the scope that is current."""
        return self._open.get(id(current_scope()), (OUTSIDE,))[0] if self._open else OUTSIDE

    def began(self, scope: Any) -> None:
        """See `tenure._registries.ScopeWatcher`."""
        if get_ident() == self._thread:
            self._step()
            self._enter(scope, self._now_s())

    def ended(self, scope: Any) -> None:
        """See `tenure._registries.ScopeWatcher`."""
        if get_ident() == self._thread:
            self._step()
            self._leave(id(scope))

    def _now_s(self) -> float:
        return (time.perf_counter_ns() - self._began_ns) / _NS

    def _enter(self, scope: Any, at_s: float) -> None:
        name = scope.name or f"the scope at {scope.site}"
        self._open[id(scope)] = name, len(self._open), at_s

    def _leave(self, identity: int) -> None:
        # told once more when it has disposed what it owned
        if (found := self._open.pop(identity, None)) is None:
            return
        self.spans.append(ScopeSpan(*found, self._now_s()))
        if len(self.spans) > _MOST_SPANS:
            self.spans.sort(key=lambda span: span.begin_s - span.end_s)
            self.n_dropped += len(self.spans) - _MOST_SPANS // 2
            del self.spans[_MOST_SPANS // 2 :]
