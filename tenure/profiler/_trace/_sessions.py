"""Where the events of a trace meet those of the allocator, for all profilers of a process.

Invariant: a session is open on a thread while, and only while, a watched frame is on its stack and
no other profiler has the thread; what the allocator did between two events of the trace is booked,
or marked to be booked, before the second is acted upon. A session is read every hundred looks, and
every few hundred calls or turns of a loop in between, so it never holds many events; on a thread
that has not enabled a profiler it is read at every look.
"""

from __future__ import annotations

import _thread
import atexit
import inspect
import threading
from collections.abc import Callable
from types import CodeType
from typing import Protocol

from tenure._torch import allocations as allocations
from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes
from tenure._torch.autograd import is_running_node
from tenure._torch.profilers import announce

from ._booking import Key
from ._host_blocks import enter_existing
from ._watches import Codes, ThreadState, Watch

TICKS_PER_TURN = 128
"""After how many ticks an engine may call ``turn`` itself."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MARKS_PER_TURN = 64


class Engine(Protocol):
    """What reports the lines of some code objects, as they run, to a hub."""

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


class Hub:
    """The one place that engines report to, and that profilers are opened in.

    Attributes:
        n_sessions: on how many threads a session is open.
    """

    def __init__(self, engine: Callable[[Hub], Engine]) -> None:
        self.n_sessions = 0
        self._lock = threading.RLock()
        self._watches: tuple[Watch, ...] = ()
        self._this_thread = _ThisThread()
        self._stop_announcing: Callable[[], None] | None = None
        self._keeps_sizes = False
        self._engine = engine(self)

    # --- what profilers call

    def is_open(self, watch: Watch) -> bool:
        """Whether a profiler is enabled."""
        return watch in self._watches

    def open(self, watch: Watch) -> None:
        """Begin to report to a profiler; on some engines only on threads that start from now on.

        One that is open gets this thread as well, if another has opened it.
        """
        with self._lock:
            self._this_thread.state.reads_seldom = True
            if self.is_open(watch):
                self._engine.join()
                return
            others = self._watches
            try:
                self._add(watch)
            except BaseException:
                self._watches = others
                self.refresh()
                if not others:
                    self._end()
                raise

    def close(self, watch: Watch) -> None:
        """Report no more to a profiler; what happened up to now is booked."""
        with self._lock:
            if not self.is_open(watch):
                return
            self.look()
            self._watches = tuple(other for other in self._watches if other is not watch)
            self._end_if_idle(self._this_thread.state)
            self.refresh()
            if not self._watches:
                self._end()

    def refresh(self) -> None:
        """Let the engine know of changed codes."""
        with self._lock:
            self._engine.watch({i: c for watch in self._watches for i, c in watch.codes.items()})

    def look(self) -> None:
        """Book what this thread did up to now, as far as its session can be read."""
        thread = self._account()
        if thread.marks and not thread.session_is_lent:
            self._read(thread)

    def close_all(self) -> None:
        """Close every profiler, so that the interpreter ends without a session."""
        for watch in self._watches:
            self.close(watch)

    # --- what the engine calls

    def enter(self, identity: int, code: CodeType, line: int) -> None:
        """A frame of a watched code begins, or goes on."""
        thread = self._account()
        if not thread.in_session:
            self._begin_session(thread)
        # a generator may go on in the middle of a line, and then does something before the next
        thread.entered = 0 if code.co_flags & _SUSPENDS else identity
        key: Key = id(code), line
        for watch in self._watches:
            if key[0] in watch.codes:
                thread.lane_of(watch).enter(identity, key)

    def line(self, identity: int, code: CodeType, line: int) -> None:
        """A watched frame is about to run a line."""
        thread = self._this_thread.state
        if thread.entered != identity or not thread.in_session:  # else nothing has run since
            thread = self._account()
            if not thread.in_session:
                self._begin_session(thread)
        thread.entered = 0
        key: Key = id(code), line
        for watch in self._watches:
            if key[0] in watch.codes:
                thread.lane_of(watch).line(identity, key)

    def leave(self, identity: int, code: CodeType, torn_down: bool) -> bool:
        """A watched frame ends or is suspended.

        Returns:
            Whether ``torn_down_now`` is wanted: the frame's variables are freed before the frame
            below goes on, and nothing else is.
        """
        thread = self._account()
        for watch in self._watches:
            if id(code) in watch.codes:
                thread.lane_of(watch).leave(identity, torn_down)
        self._end_if_idle(thread)
        return torn_down and thread.is_active(self._watches)

    def torn_down_now(self) -> None:
        """The frame that was left is gone, with its variables."""
        self._end_if_idle(self._account())

    def backward(self, change: int) -> None:
        """A backward pass begins (1) or has ended (-1) on this thread."""
        self._this_thread.state.n_backwards += change

    def this_thread(self) -> ThreadState:
        """What is known of the thread that asks."""
        return self._this_thread.state

    def tick(self) -> None:
        """Something unwatched was called, or went once more around a loop."""
        thread = self._this_thread.state
        if thread.in_session:
            thread.n_ticks += 1
            if thread.n_ticks >= TICKS_PER_TURN or not self._watches:
                self.turn()
        elif not self._keeps_sizes and self._watches:  # a thread that has just begun
            self._keep_needed_sizes(thread)

    def turn(self) -> None:
        """Keep the session of this thread short: enough may have happened in it."""
        thread = self._this_thread.state
        thread.n_ticks = 0
        if thread.in_session and not thread.session_is_lent:
            self.look()
            self._end_if_idle(thread)  # as when the last profiler was closed by another thread

    # --- sessions

    def _account(self) -> ThreadState:
        """Book, or note to be booked, what this thread did since the last look."""
        thread = self._this_thread.state
        thread.entered = 0
        thread.know(self._watches)
        if not thread.in_session:
            for lane in thread.on_host:
                if _is_lent_to_this_one(thread):
                    lane.pass_by()
                else:
                    lane.account(None)
            for lane in thread.on_devices:
                lane.account(None)
            return thread
        thread.marks.set(thread.on_host)
        if not self._keeps_sizes and _thread._count():
            self._keep_needed_sizes(thread)
        if thread.session_is_lent:
            for lane in thread.on_devices:
                lane.account(None)
        elif (
            len(thread.marks) >= _MARKS_PER_TURN
            or thread.on_devices
            or not thread.reads_seldom
            or not allocations.is_profiling()  # someone has ended it
        ):
            self._read(thread)
        return thread

    def _read(self, thread: ThreadState) -> None:
        """Book what this thread did up to the last mark, which has just been set."""
        thread.n_ticks = 0
        changes = allocations.turn()
        thread.marks.settle(changes)
        for lane in thread.on_devices:
            lane.account(changes)
        if changes is None:
            self._count_session(thread, -1)
            for lane in thread.on_host:
                lane.meter.start()  # it is read as long as no session can be opened
        else:
            self._keep_needed_sizes(thread)

    def _begin_session(self, thread: ThreadState) -> None:
        """Open one, unless the thread is another profiler's."""
        if allocations.is_profiling():
            return
        allocations.begin()
        thread.n_ticks = 0
        thread.n_backwards_outside = thread.n_backwards
        self._count_session(thread, +1)
        thread.marks.start()
        for watch in self._watches:
            thread.lane_of(watch).meter.start()

    def _end_if_idle(self, thread: ThreadState) -> None:
        if thread.in_session and not thread.is_active(self._watches):
            self._end_session(thread)

    def _end_session(self, thread: ThreadState) -> Changes | None:
        self._count_session(thread, -1)
        changes = allocations.end()
        thread.marks.settle(changes)
        return changes

    def _count_session(self, thread: ThreadState, change: int) -> None:
        with self._lock:
            thread.in_session = change > 0
            self.n_sessions += change
            self._keep_needed_sizes(thread)

    def _keep_needed_sizes(self, thread: ThreadState) -> None:
        """Let c10 keep the sizes of what is made outside of sessions, if anything can be.

        Those of a session it keeps anyway; to be told to takes it half a microsecond a block.
        """
        is_alone = thread.in_session and not _thread._count()
        self._keeps_sizes = bool(self._watches) and not is_alone
        allocator.keep_sizes(self._keeps_sizes)

    def _make_way(self) -> None:
        """A profiler of the program is about to begin on this thread."""
        thread = self._this_thread.state
        if not thread.in_session:
            return
        thread.know(self._watches)
        thread.marks.set(thread.on_host)
        changes = self._end_session(thread)
        for lane in thread.on_host:
            lane.meter.start()  # it is read until theirs has ended
        for lane in thread.on_devices:
            lane.account(changes)

    # --- the first and the last

    def _add(self, watch: Watch) -> None:
        first = not self._watches
        if first:
            self._begin()
        watch.begin()
        self._watches = (*self._watches, watch)
        self.refresh()
        if first:
            self._engine.start()
        else:
            self._engine.join()

    def _begin(self) -> None:
        self._keeps_sizes = True
        allocator.keep_sizes(True)
        enter_existing()
        self._stop_announcing = announce(self._make_way)
        atexit.register(self.close_all)

    def _end(self) -> None:
        atexit.unregister(self.close_all)
        self._engine.stop()
        if self._stop_announcing is not None:
            self._stop_announcing()
            self._stop_announcing = None
        self._keeps_sizes = False
        allocator.keep_sizes(False)


def _is_lent_to_this_one(thread: ThreadState) -> bool:
    """Whether this is a thread of autograd's engine, and its events go to who called backward()."""
    return not thread.n_backwards and is_running_node() and allocations.is_profiling()


class _ThisThread(threading.local):
    """The state of the thread that asks, made when it first does.

    Not in ``__init__``: monitoring reports that call too, and to report it is to ask for the state.
    """

    state: ThreadState

    def __getattr__(self, name: str) -> ThreadState:
        if name != "state":
            raise AttributeError(name)
        made = ThreadState()  # reported as well, by which the thread may have one already
        found: ThreadState = self.__dict__.setdefault("state", made)
        return found
