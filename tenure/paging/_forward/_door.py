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
from queue import Empty, SimpleQueue
from types import CodeType, FrameType

from tenure._callers import is_internal, line_in, package_of, warn_user
from tenure._errors import PagingError, PagingWarning

from .._device import Visit

_LOOK_EVERY_S = 1.0
_LOOKS_UNTIL_A_WARNING = 4
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
    """A lock that lets one visit in at a time; a thread that waits looks who is inside.

    The visit inside is the lock. So an interrupt leaves nothing behind, or a visit that tells
    whether its call is over.
    """

    def __init__(self) -> None:
        self._inside: dict[None, Visit] = {}
        # Has an item after a visit has ended, to wake a thread that waits.
        self._left: SimpleQueue[None] = SimpleQueue()

    @property
    def visit(self) -> Visit | None:
        """The visit that is inside."""
        return self._inside.get(None)

    def acquire(self, visit: Visit, look: Callable[[int], None]) -> None:
        """Wait until nobody is inside, and let a visit in.

        Args:
            visit: the visit.
            look: called now and then while it waits, with how often it was called before. What it
                raises ends the wait.
        """
        n_looks = 0
        while not self.try_acquire(visit):
            try:
                # Not for ever: torch tells no hook that an interruption has ended a forward, so who
                # waits has to look.
                self._left.get(timeout=_LOOK_EVERY_S)
            except Empty:
                look(n_looks)
                n_looks += 1

    def try_acquire(self, visit: Visit) -> bool:
        """Let a visit in if nobody is inside; whether it is."""
        # One step: no other thread and no interrupt comes between.
        return self._inside.setdefault(None, visit) is visit

    def hand_over(self, visit: Visit) -> None:
        """Let a visit in, in the place of the one of the same thread that is inside."""
        self._inside[None] = visit

    def release(self, visit: Visit) -> None:
        """End a visit; nothing where another one is inside."""
        if self.visit is visit:
            del self._inside[None]
            if self._left.empty():
                self._left.put(None)


def check_wait(thread: int, what: str, n_looks: int) -> None:
    """Make sure that this thread may wait for another one to leave.

    Args:
        thread: the other one.
        what: what runs there.
        n_looks: how often it was looked at before.

    Raises:
        PagingError: the other one waits for this one.
    """
    if waits_for_us(thread):
        raise PagingError(
            f"{what} on thread {name_of(thread)!r}{place_of(thread)}, waits there for this thread, "
            "which waits to get into the model: one thread at a time can be inside, and neither "
            "would ever go on. Nothing was done on this thread. Call a paged model's parts on the "
            "thread of its forward, or unpage() before."
        )
    if n_looks == _LOOKS_UNTIL_A_WARNING:
        warn_user(
            f"{what} on thread {name_of(thread)!r}{place_of(thread)}, and this thread waits until "
            "that ends: one thread at a time can be inside a paged model. If it waits for this "
            "one, neither will ever go on.",
            PagingWarning,
        )


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
