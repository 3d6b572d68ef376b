"""The sessions of torch's allocation events, one for each thread that something listens to.

Invariant: a session is open on a thread only while a listener wants it and no other profiler has
the thread; what the allocator did between two looks is told to whom the listeners say, or noted to
be told, before anything else is. A session is read after some dozens of looks, and every few
hundred calls or turns of a loop in between, so it never holds many events; on a thread that has not
opened a listener it is read at every look.

For the end of a block of host memory to be seen, c10 has to keep its size. Blocks that were there
before anyone looked are found through their tensors. What only C++ holds (what autograd saved of a
graph that is alive already) is not found.
"""

from __future__ import annotations

import _thread
import threading
import warnings
from collections.abc import Callable

from torch import Tensor, UntypedStorage

from tenure._heap import gradient_of, live_tensors
from tenure._storages import storages_of
from tenure._torch import allocations
from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes, is_profiling
from tenure._torch.autograd import is_running_node
from tenure._torch.profilers import announce
from tenure._torch.quiet import without_functions
from tenure._torch.storages import key_of

from ._booking import Watch
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
        guests: who else of tenure may have a session on a thread, and ends it when called there.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.n_open = 0
        self.listeners: tuple[Watch, ...] = ()
        self.threads = ThisThread()
        self.guests: list[Callable[[], None]] = []
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
        for make_way in tuple(self.guests):
            make_way()
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


# --- the sizes of blocks of host memory


class BlockSizes:
    """Whether c10 keeps the sizes of what is made outside of sessions.

    Those of a session it keeps anyway. To be told to takes it half a microsecond for each block,
    because it then formats a line about it: so it is told only while something may be made outside.

    Attributes:
        are_kept: whether it has been told to.
    """

    def __init__(self) -> None:
        self.are_kept = False

    def keep_all(self) -> None:
        """Keep those of all blocks that there are, and of all that come."""
        # In this order: a block is entered only in a table that is in use.
        self._keep(True)
        enter_host_blocks()

    def keep_needed(self, is_listened: bool, in_session: bool) -> None:
        """Keep those that a listener may need.

        Args:
            is_listened: whether there is one.
            in_session: whether the thread that asks has a session.
        """
        # `_count` is 0 while no thread beside the first runs: then nothing is made outside of this
        # thread's session.
        self._keep(is_listened and not (in_session and not _thread._count()))

    def keep_none(self) -> None:
        """Leave c10 as it was."""
        self.are_kept = False
        allocator.keep_sizes_as_before()

    def _keep(self, wanted: bool) -> None:
        self.are_kept = wanted
        allocator.keep_sizes(wanted)


def enter_host_blocks() -> None:
    """Enter the storages of living tensors, and of their gradients, in the allocator's table."""
    # While a profiler of the program has this thread, what is entered would seem to be made now.
    if not allocator.is_known() or is_profiling():
        return
    entered: set[int] = set()
    with warnings.catch_warnings(), without_functions():
        # Of whatever classes a heap has: to look at an object may be to ask for what is deprecated.
        warnings.simplefilter("ignore")
        for tensor in live_tensors():
            for storage in _host_storages(tensor):
                if key_of(storage) not in entered:
                    entered.add(key_of(storage))
                    allocator.enter(storage)


def _host_storages(tensor: Tensor) -> list[UntypedStorage]:
    """Those that the allocator frees: not what numpy owns, nor what is mapped or shared."""
    try:
        own = [s for s in storages_of(tensor) if s.device.type == "cpu" and _is_freed(s)]
        # To ask for the address of one that is copied when written to would copy it.
        if allocator.is_lazily_copied(tensor):
            own = []
        gradient = gradient_of(tensor)
    # A broken tensor has nothing to enter, and must not end the search.
    except Exception:
        return []
    return own if gradient is None else own + _host_storages(gradient)


def _is_freed(storage: UntypedStorage) -> bool:
    return bool(storage.resizable()) and not storage.is_shared()
