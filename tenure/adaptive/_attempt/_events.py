"""The events of a retry, for callbacks, the log and the statistics, while it happens.

An event holds plain values, so that keeping it keeps no tensor alive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from tenure._callers import user_site
from tenure._errors import AdaptiveUsageError
from tenure._oom import OomInfo
from tenure._text import format_bytes

EventKind = Literal["retry", "shrink", "grow", "give_up"]
OnRetry = Callable[["AdaptiveEvent"], object]
_AnyListener = TypeVar("_AnyListener", bound=OnRetry)

_NAMELESS = ("<lambda>", "lazy")
_logger = logging.getLogger("tenure.adaptive")


@dataclass(frozen=True, slots=True)
class AdaptiveEvent:
    """One decision of a retry.

    Attributes:
        kind: ``"retry"``: the same size again, because memory came free; ``"shrink"``: a smaller
            size; ``"grow"``: a larger one has worked; ``"give_up"``: nothing is left to try.
        name: what ran, such as the name of the function.
        unit: what the sizes count: ``"batch size"``, ``"step"``, ``"micro-batch"``.
        size: the size that was tried; when growing the one before it, which worked too.
        next_size: the size that comes next; when growing the one that has just worked; None when
            giving up.
        info: the out-of-memory error; None when growing.
        freed_bytes: what was given back before a retry of the same size; 0 otherwise.
    """

    kind: EventKind
    name: str
    unit: str
    size: int
    next_size: int | None
    info: OomInfo | None = None
    freed_bytes: int = 0

    def __str__(self) -> str:
        return self._told_of(repr(self.name))

    def _told_of(self, work: str) -> str:
        """Return the decision in words.

        Args:
            work: what ran, as the sentence names it.
        """
        if self.kind == "grow":
            now = (
                f"a step of {self.next_size}"
                if self.unit == "step"
                else f"{self.unit} {self.next_size}"
            )
            return f"{work} goes on with {now}, after {self.size}."
        # "at step 1000" would be an iteration
        at = f"with a step of {self.size}" if self.unit == "step" else f"at {self.unit} {self.size}"
        ran_out = f"{work} ran out of {memory_of(self.info)} {at}"
        return f"{ran_out}{_needed(self.info)}; {self._outcome()}."

    def _outcome(self) -> str:
        if self.kind == "retry":
            return f"tries it again after {format_bytes(self.freed_bytes)} came free"
        if self.kind == "shrink":
            return f"begins again with {self.next_size}, and may grow from there"
        return "gives up"


def _named(name: str) -> str:
    """Return the name of the function, with the caller's line if the name says nothing."""
    return f"{name!r} at {user_site()}" if name in _NAMELESS else repr(name)


def memory_of(info: OomInfo | None) -> str:
    """Return which memory: ``"cuda:0 memory"``, or just ``"memory"``."""
    return f"{info.device} memory" if info is not None and info.device else "memory"


def _needed(info: OomInfo | None) -> str:
    if info is None or info.requested_bytes is None:
        return ""
    return f" (needed {format_bytes(info.requested_bytes)} more)"


@dataclass(slots=True)
class AdaptiveStatistics:
    """Counts of attempts on one thread, of those that ran out of memory, and of their outcomes.

    Attributes:
        attempts: pieces of work begun.
        ooms: attempts that ran out of memory.
        retries: sizes that were tried again because memory came free.
        shrinks: steps to a smaller size.
        growths: larger sizes that worked.
        gave_up: calls that ended with OutOfRetriesError.
    """

    attempts: int = 0
    ooms: int = 0
    retries: int = 0
    shrinks: int = 0
    growths: int = 0
    gave_up: int = 0

    def reset(self) -> None:
        """Set every count to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)

    def __str__(self) -> str:
        return (
            f"{self.attempts} attempts, {self.ooms} out of memory: {self.retries} tried again, "
            f"{self.shrinks} made smaller, {self.gave_up} given up; {self.growths} made larger"
        )


_COUNTED_AS: dict[EventKind, str] = {
    "retry": "retries",
    "shrink": "shrinks",
    "grow": "growths",
    "give_up": "gave_up",
}


class _ListenersOfThread(threading.local):
    def __init__(self) -> None:
        self.statistics = AdaptiveStatistics()


this_thread = _ListenersOfThread()
# replaced under the lock and never changed, so that whoever tells an event reads it without one
_listeners: tuple[OnRetry, ...] = ()
_lock = threading.Lock()


def statistics() -> AdaptiveStatistics:
    """Return the counts of this thread, always the same object."""
    return this_thread.statistics


def add_listener(listener: _AnyListener) -> _AnyListener:
    """Call ``listener(event)`` at each decision of any retry, on the thread that retries.

    May be used as a decorator. A second addition of the same listener changes nothing. An error
    that it raises goes on to the one who called the retry.

    Args:
        listener: takes an AdaptiveEvent; what it returns is ignored.

    Raises:
        AdaptiveUsageError: it can't be called.
    """
    global _listeners
    if not callable(listener):
        raise AdaptiveUsageError(
            f"add_listener() wants a function of an AdaptiveEvent, and got {listener!r}."
        )
    with _lock:
        if listener not in _listeners:
            _listeners = (*_listeners, listener)
    return listener


def remove_listener(listener: Callable[[AdaptiveEvent], Any]) -> None:
    """Call it no more.

    Args:
        listener: what `add_listener` was given; one that was not added is ignored.
    """
    global _listeners
    with _lock:
        _listeners = tuple(each for each in _listeners if each != listener)


def tell(event: AdaptiveEvent, on_retry: OnRetry | None = None) -> None:
    """Count an event, log a new size in one line, and call those who listen."""
    counts, name = statistics(), _COUNTED_AS[event.kind]
    setattr(counts, name, getattr(counts, name) + 1)
    # that one becomes an error, which says it
    if event.kind != "give_up":
        level = logging.WARNING if event.kind == "shrink" else logging.INFO
        if _logger.isEnabledFor(level):
            _logger.log(level, "tenure: %s", event._told_of(_named(event.name)))
    # What a listener raises is not caught: so a program can end a retry.
    for listener in (*_listeners, *([on_retry] if on_retry else [])):
        listener(event)
