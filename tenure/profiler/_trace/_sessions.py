"""The sessions of torch's allocation events, one for each thread that something listens to.

Invariant: a session is open on a thread only while a listener wants it and no other profiler has
the thread; what the allocator did between two looks is told to whom the listeners say, or noted to
be told, before anything else is. A session is read after some dozens of looks, and every few
hundred calls or turns of a loop in between, so it never holds many events; on a thread that has not
opened a listener it is read at every look.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from tenure._torch import allocations
from tenure._torch.allocations import Changes
from tenure._torch.autograd import is_running_node
from tenure._torch.profilers import announce

from ._host_blocks import BlockSizes
from ._listeners import Listener
from ._threads import ThisThread, ThreadState

TICKS_PER_TURN = 128
"""After how many ticks an engine may call ``turn`` itself."""
# Reading takes its time for each session and for each event in it: fewest both at about a hundred.
_LOOKS_PER_TURN = 64


class Sessions:
    """The sessions of all threads of a process; what runs in them it does not know.

    Attributes:
        lock: held while listeners are opened and closed, and sessions counted. One for both: the
            end of a session on another thread must not stop c10 from keeping sizes while the first
            listener is being opened.
        n_open: on how many threads a session is open.
        listeners: who is told.
        threads: whose ``state`` is that of the thread that asks.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.n_open = 0
        self.listeners: tuple[Listener, ...] = ()
        self.threads = ThisThread()
        self._sizes = BlockSizes()
        self._stop_announcing: Callable[[], None] | None = None

    # --- the first listener, and after the last

    def start(self) -> None:
        """Let c10 keep sizes, and the program's profilers say that they begin."""
        # Sizes first: the search for blocks takes tens of milliseconds, and may fail. Nothing of
        # torch's has been touched by then.
        self._sizes.keep_all()
        self._stop_announcing = announce(self._make_way)

    def stop(self) -> None:
        """Leave torch as it was; after a start that failed, too."""
        if self._stop_announcing is not None:
            self._stop_announcing()
            self._stop_announcing = None
        self._sizes.keep_none()

    # --- looks

    def look(self) -> ThreadState:
        """Tell, or note to be told, what this thread did since the last look."""
        thread = self.threads.state
        thread.entered = 0
        # `know` asks this too; but most looks need no more, and each line takes one.
        if thread.opened is not self.listeners:
            thread.know(self.listeners)
        if not thread.in_session:
            self._look_outside(thread)
            return thread
        thread.looks.defer(thread.waiting)
        # A thread that Python doesn't report may have begun since: what it makes is seen to end
        # from here on. See
        # test_what_a_thread_makes_that_python_does_not_trace_is_seen_from_the_next_line_on.
        if not self._sizes.are_kept and _thread._count():
            self._keep_needed_sizes(thread)
        if thread.session_is_lent:
            for part in thread.prompt:
                part.account(None)
        elif (
            len(thread.looks) >= _LOOKS_PER_TURN
            or thread.prompt
            or not thread.reads_seldom
            # Someone has ended it: what follows is not to be marked where nothing is noted.
            or not allocations.is_profiling()
        ):
            self._read(thread)
        return thread

    def read(self) -> None:
        """Tell all that this thread did up to now, as far as its session can be read."""
        thread = self.look()
        if thread.looks and not thread.session_is_lent:
            self._read(thread)

    def tick(self) -> None:
        """Something was called, or went once more around a loop, that nobody is told of."""
        thread = self.threads.state
        if thread.in_session:
            thread.n_ticks += 1
            if thread.n_ticks >= TICKS_PER_TURN or not self.listeners:
                self.turn()
        elif not self._sizes.are_kept and self.listeners:
            # This thread has just begun: what it makes has no session, and only the table knows it.
            self._keep_needed_sizes(thread)

    def turn(self) -> None:
        """Keep the session of this thread short: enough may have happened in it."""
        thread = self.threads.state
        thread.n_ticks = 0
        if thread.in_session and not thread.session_is_lent:
            self.read()
            # As when another thread has closed the last listener: nobody else could end it.
            self.end_if_idle(thread)

    def _look_outside(self, thread: ThreadState) -> None:
        """A look on a thread that has no session: its listeners see the levels alone."""
        for part in thread.waiting:
            if _is_lent_to_this_one(thread):
                part.pass_by()
            else:
                part.account(None)
        for part in thread.prompt:
            part.account(None)

    def _read(self, thread: ThreadState) -> None:
        """Tell what this thread did up to the last look, which has just been taken."""
        thread.n_ticks = 0
        changes = allocations.turn()
        thread.looks.tell_deferred(changes)
        for part in thread.prompt:
            part.account(changes)
        if changes is None:
            self._count_session(thread, -1)
            # From here on they see levels, as long as no session can be opened.
            for part in thread.waiting:
                part.start()
        else:
            self._keep_needed_sizes(thread)

    # --- one session

    def begin(self, thread: ThreadState) -> None:
        """Open one on this thread, unless the thread is another profiler's."""
        if allocations.is_profiling():
            return
        allocations.begin()
        thread.n_ticks = 0
        thread.n_backwards_outside = thread.n_backwards
        self._count_session(thread, +1)
        # Levels after the count, which lets c10 keep what it has to for them to be right.
        thread.looks.start()
        for listener in self.listeners:
            thread.part_of(listener).start()

    def end_if_idle(self, thread: ThreadState) -> None:
        """End the session of this thread, if it has one that no listener wants."""
        if thread.in_session and not thread.is_active(self.listeners):
            self._end(thread)

    def _end(self, thread: ThreadState) -> Changes | None:
        # Sizes are kept before the session ends, so that nothing is made between the two unseen.
        self._count_session(thread, -1)
        changes = allocations.end()
        thread.looks.tell_deferred(changes)
        return changes

    def _count_session(self, thread: ThreadState, change: int) -> None:
        with self.lock:
            thread.in_session = change > 0
            self.n_open += change
            self._keep_needed_sizes(thread)

    def _keep_needed_sizes(self, thread: ThreadState) -> None:
        self._sizes.keep_needed(bool(self.listeners), thread.in_session)

    def _make_way(self) -> None:
        """A profiler of the program is about to begin on this thread."""
        thread = self.threads.state
        if not thread.in_session:
            return
        thread.know(self.listeners)
        thread.looks.defer(thread.waiting)
        changes = self._end(thread)
        # They see levels until theirs has ended, from where ours has.
        for part in thread.waiting:
            part.start()
        for part in thread.prompt:
            part.account(changes)


def _is_lent_to_this_one(thread: ThreadState) -> bool:
    """Whether this is a thread of autograd's engine, and its events go to who called backward()."""
    return not thread.n_backwards and is_running_node() and allocations.is_profiling()
