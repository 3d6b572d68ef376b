"""The thread that reads files while others compute.

Invariant: what is asked for is read one after the other, in the order of asking; an error stands in
the result, and nothing is raised where it is read.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Done:
    """A read that is over.

    Attributes:
        began_s: when it began, by ``time.perf_counter``.
        ended_s: when it ended.
        error: why it failed, if it did.
        span: what the read returned.
    """

    began_s: float
    ended_s: float
    error: BaseException | None = None
    span: Any = None


def raise_anew(error: BaseException | None) -> None:
    """Raise a copy of the error that a read has left, if it left one, as often as it is asked for.

    The error itself stays in its result, and would hold the frames of all that it was raised to:
    the paged model among them, which then never went.
    """
    if error is not None:
        raise copy(error) from error.__cause__


class Reader:
    """One thread, started with the first read; a forked process gets one of its own."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._thread: int | None = None
        self._last: Future[Done] | None = None
        _readers[id(self)] = self

    def submit(self, read: Callable[[], object]) -> Future[Done]:
        """Have something read after all that was asked for before."""
        try:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, thread_name_prefix="tenure-reader")
            self._last = self._threads.submit(self._on_thread, read)
        except RuntimeError:
            # Python ends the threads of pools before it waits for other threads, and before it
            # calls functions of atexit. Then, and if no thread can be started, the caller reads.
            self.drain()
            self._thread = None
            self._last = Future()
            self._last.set_result(_timed(read))
        return self._last

    @property
    def is_current(self) -> bool:
        """Whether this is its thread; a garbage collection there may close anything."""
        return threading.get_ident() == self._thread

    def drain(self) -> None:
        """Wait until all that was asked for is read; its own thread can't."""
        if self._last is not None and not self.is_current:
            self._last.result()

    def close(self) -> None:
        """End the thread, after what it was asked for; the next read starts another."""
        threads, self._threads = self._threads, None
        if threads is not None:
            # A garbage collection may run on the reader's thread, which can't wait for itself.
            threads.shutdown(wait=not self.is_current)

    def forget_thread(self) -> None:
        """In a forked process: the thread is the parent's."""
        self._threads = None

    def _on_thread(self, read: Callable[[], object]) -> Done:
        self._thread = threading.get_ident()
        return _timed(read)


def _timed(read: Callable[[], object]) -> Done:
    began_s = time.perf_counter()
    error: BaseException | None = None
    span = None
    try:
        span = read()
    except BaseException as raised:
        # It would hold what was being read.
        error = raised.with_traceback(None)
    return Done(began_s, time.perf_counter(), error, span)


# Weakly: whoever drops a model must not keep its reader, nor the thread of that. A list of its
# references is made in one go, whatever other threads page meanwhile.
_readers: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()


def _each(action: Callable[[Reader], None]) -> Callable[[], None]:
    def act() -> None:
        for reference in _readers.valuerefs():
            if (reader := reference()) is not None:
                action(reader)

    return act


# A forked process has the memory of a read that was under way, but no thread to end it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_each(Reader.drain), after_in_child=_each(Reader.forget_thread))
