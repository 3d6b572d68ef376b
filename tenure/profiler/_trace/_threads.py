"""What each thread keeps while something listens: its session's state, and the listeners' parts.

Invariant: a thread has at most one part of a listener, and keeps it while the listener is open.
"""

from __future__ import annotations

import threading

from ._deferred import DeferredLooks
from ._listeners import Listener, ThreadListener


class ThreadState:
    """What the sessions know of one thread.

    Attributes:
        in_session: whether a session of the allocator's events is open on it.
        reads_seldom: whether looks may wait; else its session is read at each, so that other
            threads can be told what it did.
        n_ticks: how often it ticked since the session was read.
        n_backwards: how many backward passes run on it, one inside the other.
        n_backwards_outside: how many of them ran when the session was opened.
        looks: those that are still to be told of.
        entered: the frame that began last, until something else is looked at.
        waiting: the parts that are told of their claims when the session is read.
        prompt: the other parts.
        opened: the listeners that were open when this thread last asked.
    """

    __slots__ = (
        "_parts", "entered", "in_session", "looks", "n_backwards", "n_backwards_outside",
        "n_ticks", "opened", "prompt", "reads_seldom", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.in_session = False
        self.reads_seldom = False
        self.n_ticks = 0
        self.n_backwards = self.n_backwards_outside = 0
        self.looks = DeferredLooks()
        self.entered = 0
        self.waiting: tuple[ThreadListener, ...] = ()
        self.prompt: tuple[ThreadListener, ...] = ()
        self.opened: tuple[Listener, ...] = ()
        self._parts: dict[Listener, ThreadListener] = {}

    @property
    def session_is_lent(self) -> bool:
        """Whether the engine has the session, and only marks can be set in it."""
        # While a backward pass calls Python, torch has given the thread a copy of the state that
        # it had when backward() was called, and puts the original back afterwards. A session is
        # part of that state: one that was begun outside of the pass and is ended in it has ended
        # in the copy alone, and what a new one sees is lost with the copy. A session that was
        # begun inside (a hook is the outermost watched frame) is the copy's own, and can be read
        # as ever, until that hook starts a backward pass itself. So it is not asked whether a pass
        # runs, but whether more of them run than when the session was opened. See
        # test_backward.py, "a backward inside a backward".
        return self.in_session and self.n_backwards > self.n_backwards_outside

    def part_of(self, listener: Listener) -> ThreadListener:
        """The part of a listener that is open, which wants what the listener now wants."""
        part = self._parts.get(listener)
        if part is None:
            part = self._parts[listener] = listener.on_thread(self.looks)
            self._sort()
        elif part.is_outdated:
            part.renew()
            self._sort()
        return part

    def know(self, opened: tuple[Listener, ...]) -> None:
        """Keep the parts of the listeners that are open, and let go of the others."""
        # Compared by identity: it is a new tuple whenever one is opened or closed, and each look
        # of each thread comes here.
        if opened is not self.opened:
            self.opened = opened
            self._parts = {who: part for who, part in self._parts.items() if who in opened}
            for part in self._parts.values():
                part.forget_if_reopened()
            self._sort()

    def is_active(self, opened: tuple[Listener, ...]) -> bool:
        """Whether a listener wants a session to stay open."""
        self.know(opened)
        return any(part.is_active for part in self._parts.values())

    def _sort(self) -> None:
        parts = self._parts.values()
        self.waiting = tuple(part for part in parts if part.can_wait)
        self.prompt = tuple(part for part in parts if not part.can_wait)


class ThisThread(threading.local):
    """The state of the thread that asks, made when it first does.

    Not in ``__init__``: monitoring reports that call too, and to report it is to ask for the state.
    See test_a_thread_may_enable_a_profiler_that_is_on_as_the_first_thing_it_does.
    """

    state: ThreadState

    def __getattr__(self, name: str) -> ThreadState:
        if name != "state":
            raise AttributeError(name)
        # To make it is reported as well, by which the thread may have one already.
        made = ThreadState()
        found: ThreadState = self.__dict__.setdefault("state", made)
        return found
