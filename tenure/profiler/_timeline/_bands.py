"""Which scopes were open when, on one thread; and the number of the innermost, for what it makes.

Invariant: a span begins when its scope becomes the current one and ends when it gives way, so a
generator's scope has one for each time that it ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

from tenure._registries import scope_watchers
from tenure.scopes import current_scope

from . import _timeline_report

OUTSIDE = 0
"""The number of what is made in no scope."""
# of more the longest are kept
_MOST_SPANS = 4096
# A program may name each step's scope by its number.
_MOST_NAMES = 1024
_OTHER_SCOPES = "other scopes"


class Span(NamedTuple):
    """One stretch of a scope, in nanoseconds since the recording began."""

    name: int
    depth: int
    begin_ns: int
    end_ns: int


class Bands:
    """The scopes of the thread that opens it.

    Args:
        step: called where a band begins and ends.

    Attributes:
        names: by number.
        spans: those that have ended.
        n_dropped: how many short ones were left out.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self.names = [_timeline_report.OUTSIDE]
        self.spans: list[Span] = []
        self.n_dropped = 0
        self._began_ns = 0
        self._numbers: dict[Any, int] = {}
        self._step = step
        # the scope that was left last, which may tell of its end once more
        self._left = 0
        self._open: dict[int, tuple[int, int, int]] = {}
        self._thread = get_ident()

    def open(self, began_ns: int) -> None:
        """Begin with the scopes that are open now, at a time of ``time.perf_counter_ns()``."""
        self._began_ns = began_ns
        self._thread = get_ident()
        around = []
        scope: Any = current_scope()
        while scope is not None:
            around.append(scope)
            scope = scope.outer
        for scope in reversed(around):
            self._enter(scope, 0)
        scope_watchers.append(self)

    def close(self) -> None:
        """End all spans."""
        if self in scope_watchers:
            scope_watchers.remove(self)
        now = time.perf_counter_ns() - self._began_ns
        for identity in list(self._open):
            self._leave(identity, now)

    def current(self) -> int:
        """The number of the scope that is current."""
        if not self._open:
            return OUTSIDE
        found = self._open.get(id(current_scope()))
        return OUTSIDE if found is None else found[0]

    # --- told by scopes

    def began(self, scope: Any) -> None:
        """See `tenure._registries.ScopeWatcher`."""
        if get_ident() == self._thread:
            self._step()
            self._enter(scope, time.perf_counter_ns() - self._began_ns)

    def ended(self, scope: Any) -> None:
        """See `tenure._registries.ScopeWatcher`."""
        if get_ident() == self._thread:
            self._step()
            self._leave(id(scope), time.perf_counter_ns() - self._began_ns)

    def _enter(self, scope: Any, at_ns: int) -> None:
        key = scope.name or scope.site
        number = self._numbers.get(key)
        if number is None and len(self.names) >= _MOST_NAMES:
            if len(self.names) == _MOST_NAMES:
                self.names.append(_OTHER_SCOPES)
            number = _MOST_NAMES
        elif number is None:
            number = self._numbers[key] = len(self.names)
            self.names.append(scope.name or f"the scope at {scope.site}")
        self._left = 0
        self._open[id(scope)] = number, len(self._open), at_ns

    def _leave(self, identity: int, at_ns: int) -> None:
        found = self._open.pop(identity, None)
        if found is None:
            if identity == self._left and self.spans:
                self.spans[-1] = self.spans[-1]._replace(end_ns=at_ns)
            return
        self._left = identity
        self.spans.append(Span(*found, at_ns))
        if len(self.spans) > _MOST_SPANS:
            self.spans.sort(key=lambda span: span.begin_ns - span.end_ns)
            self._left = 0
            self.n_dropped += len(self.spans) - _MOST_SPANS // 2
            del self.spans[_MOST_SPANS // 2 :]
