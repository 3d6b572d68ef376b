"""Where engines report what runs, and listeners are opened.

Invariant: before a listener is told of a frame or a line, a look is taken, so what the allocator
did until then goes to what ran until then.
"""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Protocol

from ._booking import Codes, Key, Watch
from ._sessions import Sessions

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Engine(Protocol):
    """What reports the lines of some code objects, as they run, to a trace."""

    def start(self) -> None:
        """Begin to report."""

    def join(self) -> None:
        """Report from this thread too, once another has started; where that takes something."""

    def watch(self, codes: Codes) -> None:
        """Report these codes and no others; unwatched ones only tick."""

    def stop(self) -> None:
        """Report nothing more, but tick on threads in a session until they know that it is over.

        Does nothing on an engine that could not start.
        """


class Trace:
    """The one place that engines report to, and that listeners are opened in.

    Attributes:
        sessions: those that run meanwhile.
    """

    def __init__(self, engine: Callable[[Trace], Engine]) -> None:
        self.sessions = Sessions()
        self._threads = self.sessions.threads
        self._engine = engine(self)

    # --- what listeners call

    def is_open(self, listener: Watch) -> bool:
        """Whether a listener is told what happens."""
        return listener in self.sessions.listeners

    def open(self, listener: Watch) -> None:
        """Begin to tell a listener; on some engines only of threads that start from now on.

        One that is open is told of this thread as well, if another has opened it.
        """
        sessions = self.sessions
        with sessions.lock:
            self._threads.state.reads_seldom = True
            if self.is_open(listener):
                self._engine.join()
                return
            others = sessions.listeners
            try:
                self._add(listener)
            except BaseException:
                # All that was begun is undone, whichever step has failed: see test_sessions.py.
                sessions.listeners = others
                self.refresh()
                if not others:
                    self._end()
                raise

    def close(self, listener: Watch) -> None:
        """Tell a listener no more; what happened up to now is told."""
        sessions = self.sessions
        with sessions.lock:
            if not self.is_open(listener):
                return
            # The order: it is told while it is still one of them; the session that only it wanted
            # is ended while the engine still runs; the engine stops last, and goes on ticking on
            # threads whose sessions it could not end from here.
            sessions.look()
            sessions.listeners = tuple(who for who in sessions.listeners if who is not listener)
            sessions.end_if_idle(self._threads.state)
            self.refresh()
            if not sessions.listeners:
                self._end()

    def close_all(self) -> None:
        """Close every listener, so that the interpreter ends without a session."""
        for listener in self.sessions.listeners:
            self.close(listener)

    def refresh(self) -> None:
        """Let the engine know of changed codes."""
        sessions = self.sessions
        with sessions.lock:
            self._engine.watch({i: c for who in sessions.listeners for i, c in who.codes.items()})

    # --- what the engine calls

    def enter(self, identity: int, code: CodeType, line: int) -> None:
        """A frame of a watched code begins, or goes on."""
        sessions = self.sessions
        thread = sessions.look()
        if not thread.in_session:
            sessions.begin(thread)
        # A generator may go on in the middle of a line, and then does something before the next:
        # see test_what_a_generator_does_after_it_goes_on_is_of_the_line_that_it_waited_on.
        thread.entered = 0 if code.co_flags & _SUSPENDS else identity
        key: Key = id(code), line
        for listener in sessions.listeners:
            if key[0] in listener.codes:
                thread.part_of(listener).enter(identity, key)

    def line(self, identity: int, code: CodeType, line: int) -> None:
        """A watched frame is about to run a line."""
        sessions = self.sessions
        thread = self._threads.state
        # Between the beginning of a frame and its first line nothing has run: no second look.
        if thread.entered != identity or not thread.in_session:
            thread = sessions.look()
            if not thread.in_session:
                sessions.begin(thread)
        thread.entered = 0
        key: Key = id(code), line
        for listener in sessions.listeners:
            if key[0] in listener.codes:
                thread.part_of(listener).line(identity, key)

    def leave(self, identity: int, code: CodeType, torn_down: bool) -> bool:
        """A watched frame ends or is suspended.

        Returns:
            Whether ``torn_down_now`` is wanted: the frame's variables are freed before the frame
            below goes on, and nothing else is.
        """
        sessions = self.sessions
        thread = sessions.look()
        for listener in sessions.listeners:
            if id(code) in listener.codes:
                thread.part_of(listener).leave(identity, torn_down)
        sessions.end_if_idle(thread)
        return torn_down and thread.is_active(sessions.listeners)

    def torn_down_now(self) -> None:
        """The frame that was left is gone, with its variables."""
        self.sessions.end_if_idle(self.sessions.look())

    def backward(self, change: int) -> None:
        """A backward pass begins (1) or has ended (-1) on this thread."""
        self._threads.state.n_backwards += change

    # --- the first and the last

    def _add(self, listener: Watch) -> None:
        sessions = self.sessions
        first = not sessions.listeners
        if first:
            sessions.start()
            # A profiler that nobody closes must not leave a session to the interpreter's end.
            atexit.register(self.close_all)
        # It counts from what is live, which is known once sizes are kept. Its codes are watched
        # before the engine starts, so that the frames that run already are found at once; and the
        # engine starts last, because from then on it reports what is called here.
        listener.begin()
        sessions.listeners = (*sessions.listeners, listener)
        self.refresh()
        if first:
            self._engine.start()
        else:
            self._engine.join()

    def _end(self) -> None:
        atexit.unregister(self.close_all)
        # The engine first: what it reports from here on would find sizes no longer kept.
        self._engine.stop()
        self.sessions.stop()
