"""The door of a paged model: one thread at a time is inside, and who waits is told when it is long.

Invariant: nobody waits for a thread that waits for him, nor without a word. Such a wait is an error
at the first look around, any other a warning after some of them.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import RLock
from types import CodeType, FrameType

from tenure._callers import is_internal, line_in, package_of

_LOOK_EVERY_S = 1.0
# The libraries that a thread waits in: its user wants to know which line of the program does
_WAITING = ("concurrent", "queue", "threading")
_WAITS: dict[CodeType, str] = {
    Future.result.__code__: "self",
    Future.exception.__code__: "self",
    threading.Thread.join.__code__: "self",
    concurrent.futures.wait.__code__: "fs",
    concurrent.futures.as_completed.__code__: "fs",
}
"""Functions that wait for threads, and which of their variables is what they wait for."""


class Door:
    """A lock that a thread may take several times, and that looks around while it waits."""

    def __init__(self) -> None:
        self._lock = RLock()

    def acquire(self, look: Callable[[int], None]) -> None:
        """Wait until no other thread is inside.

        Args:
            look: called now and then while it waits, with how often it was called before. What it
                raises ends the wait.
        """
        n_looks = 0
        while True:
            lock = self._lock
            # Not for ever: torch tells no hook that an interruption has ended a forward, so who
            # waits has to look.
            if not lock.acquire(timeout=_LOOK_EVERY_S):
                look(n_looks)
                n_looks += 1
            elif lock is self._lock:
                return
            else:
                # Another thread put a new one in its place.
                lock.release()

    def try_acquire(self) -> bool:
        """Go in if no other thread is inside; whether it did."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Take back one entry."""
        self._lock.release()

    def release_for(self, thread: int) -> None:
        """The same of a thread that does not come back to do it, for its only entry."""
        if thread == threading.get_ident():
            self.release()
        else:
            self._lock = RLock()

    def seize(self, n_times: int) -> None:
        """Take over the entries of a thread that will not take them back itself."""
        # A lock can only be released by the thread that took it, and that one may be gone.
        lock = RLock()
        for _ in range(n_times):
            lock.acquire()
        self._lock = lock


def waits_for_us(thread: int) -> bool:
    """Whether a thread waits for this one to end, or for the work that a pool gave to it."""
    ours: list[object] = [threading.current_thread()]
    # A pool's thread runs a work item; its future is public, the class of the item is not
    ours += [
        getattr(frame.f_locals.get("self"), "future", None) for frame in _stack(sys._getframe())
    ]
    known = {id(each) for each in ours if isinstance(each, Future | threading.Thread)}
    return any(id(each) in known for each in _awaited_by(thread))


def place_of(thread: int) -> str:
    """The line that a thread is at, outside of the libraries that it waits in."""
    frames = list(_stack(sys._current_frames().get(thread)))
    own = (frame for frame in frames if not _waits_or_is_internal(frame))
    frame = next(own, frames[0] if frames else None)
    return "" if frame is None else f" (at {line_in(frame.f_code.co_filename, frame.f_lineno)})"


def name_of(thread: int) -> str:
    """A thread's own name."""
    names = (each.name for each in threading.enumerate() if each.ident == thread)
    return next(names, f"{thread}, which has ended")


def _awaited_by(thread: int) -> Iterator[object]:
    for frame in _stack(sys._current_frames().get(thread)):
        variable = _WAITS.get(frame.f_code)
        if variable is not None:
            awaited = frame.f_locals.get(variable)
            yield from awaited if isinstance(awaited, set | list | tuple) else [awaited]


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits_or_is_internal(frame: FrameType) -> bool:
    return is_internal(frame) or package_of(frame) in _WAITING
