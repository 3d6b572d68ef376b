"""What each thread keeps while something listens: its session's state, and what is to be told.

Invariant: a thread has at most one part of a listener, and keeps it while the listener is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes, as_event, marker

from ._booking import Booking, Visit, Watch


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
        self.waiting: tuple[Booking, ...] = ()
        self.prompt: tuple[Booking, ...] = ()
        self.opened: tuple[Watch, ...] = ()
        self._parts: dict[Watch, Booking] = {}

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

    def part_of(self, listener: Watch) -> Booking:
        """The part of a listener that is open, which wants what the listener now wants."""
        part = self._parts.get(listener)
        if part is None:
            part = self._parts[listener] = listener.on_thread(self.looks.claims)
            self._sort()
        elif part.is_outdated:
            part.renew()
            self._sort()
        return part

    def know(self, opened: tuple[Watch, ...]) -> None:
        """Keep the parts of the listeners that are open, and let go of the others."""
        # Compared by identity: it is a new tuple whenever one is opened or closed, and each look
        # of each thread comes here.
        if opened is not self.opened:
            self.opened = opened
            self._parts = {who: part for who, part in self._parts.items() if who in opened}
            for part in self._parts.values():
                part.forget_if_reopened()
            self._sort()

    def is_active(self, opened: tuple[Watch, ...]) -> bool:
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


class DeferredLooks:
    """The looks in one thread's session since it was last read."""

    __slots__ = ("_level_bytes", "_live", "_looks", "_set_mark")

    def __init__(self) -> None:
        # Of each look the level there, and of each listener whose the time before it was.
        self._looks: list[tuple[int, list[Visit | None]]] = []
        self._level_bytes = 0
        # From the start of a session on; asked for once, because each line uses them.
        self._set_mark: Callable[[int], None]
        self._live: Any

    def __len__(self) -> int:
        return len(self._looks)

    def start(self) -> None:
        """Begin with a session."""
        self._set_mark = marker()
        self._live = allocator.live_counter()
        self._level_bytes = self._live.value

    def defer(self, listeners: Iterable[Booking]) -> None:
        """Mark this place: the time before it belongs to what these listeners claim."""
        # An interrupt may come between any two of these steps. A look without a mark is told of
        # with the next; a mark without a look would be taken for that of the next. See
        # test_an_interrupt_at_a_mark_loses_no_other_line.
        self._looks.append((self._live.value, [listener.claim() for listener in listeners]))
        self._set_mark(len(self._looks) - 1)

    def claims(self) -> list[Visit]:
        """Those that more may have happened to than they have been told."""
        # A copy first: other threads ask while this one goes on looking.
        return [c for _, claims in list(self._looks) for c in claims if c is not None]

    def tell_deferred(self, changes: Changes | None) -> None:
        """Tell what happened up to each mark; with no changes, what the levels say of it."""
        # Emptied first, so that an interrupt halfway tells nothing twice.
        looks, self._looks = self._looks, []
        start, was, is_known = 0, self._level_bytes, allocator.is_known()
        for number, (level, claims) in enumerate(looks):
            end = None if changes is None else _find(changes.cpu, as_event(number), start)
            part: list[int] = []
            if end is not None and changes is not None:
                part, start = changes.cpu[start:end], end + 1
                # The end is what other threads left it at; else this thread's own sum.
                level = level if is_known else was + sum(part)
            for claim in claims:
                if claim is None:
                    continue
                if end is not None:
                    claim.take(part, level, is_known)
                else:
                    # A mark that is missing was set in a state that the session is not in: what
                    # came before it is told with the next mark, and here only the level is known.
                    claim.miss(was if changes is None else level, level)
            was = level
        self._level_bytes = was


def _find(events: list[int], mark: int, start: int) -> int | None:
    try:
        return events.index(mark, start)
    except ValueError:
        return None
