"""Where profilers are opened, and lines that run are booked: the base of the two sources of lines.

Invariant: before a profiler is told of a frame or a line, a mark is set in the stream of the
thread, so what the allocator did until then goes to what ran until then.
"""

from __future__ import annotations

import atexit
import threading
from abc import ABC, abstractmethod
from types import CodeType
from typing import Any

from tenure._stream import Stream, ThisThread, process, this_stream
from tenure._torch import cpu_allocator as allocator

from ._book import Booking, Codes, Key, Visit, Watch, host_usage
from ._device_meter import unseen_usage
from ._targets import SUSPENDS

TICKS_PER_TURN = 128
"""After how many ticks a source may call ``turn`` itself."""


class Thread:
    """The watched frames of one thread: a consumer of its stream.

    Attributes:
        stream: that of the thread.
        reads_seldom: whether marks may wait; else the stream is read at each, so that other
            threads can be told what this one did.
        n_ticks: how often it ticked since the last turn.
        follows: whether it is told what the stream tells.
        entered: the frame that began last, until something else is looked at.
        tracer: the trace functions of the thread, if its lines come from ``sys.settrace``.
    """

    def __init__(self) -> None:
        self.stream: Stream = this_stream()
        self.reads_seldom = False
        self.n_ticks = 0
        self.follows = False
        self.entered = 0
        self.tracer: Any = None
        self._watches: tuple[Watch, ...] = ()
        self._bookings: dict[Watch, Booking] = {}
        self._is_known = allocator.is_known()

    def know(self, watches: tuple[Watch, ...]) -> None:
        """Keep the bookings of the profilers that are open, and drop the others."""
        # Compared by identity: it is a new tuple whenever one is opened or closed.
        if watches is not self._watches:
            self._watches = watches
            self._bookings = {who: each for who, each in self._bookings.items() if who in watches}
            for watch, booking in self._bookings.items():
                booking.follow(watch)

    def booking_of(self, watch: Watch) -> Booking:
        """Return the booking of a profiler that is open."""
        found = self._bookings.get(watch)
        if found is None:
            found = self._bookings[watch] = Booking(watch, self.stream.claims)
            watch.bookings.append(found)
        else:
            found.follow(watch)
        return found

    @property
    def is_active(self) -> bool:
        """Whether a profiler wants to be told."""
        return any(each.is_active for each in self._bookings.values())

    def mark(self, watches: tuple[Watch, ...], *, goes_on: bool = False) -> None:
        """Claim what happened since the last mark for the lines that did it.

        Args:
            watches: the profilers that are open.
            goes_on: whether the line goes on with what it does, such as freeing variables.
        """
        self.entered = 0
        if watches is not self._watches:
            self.know(watches)
        if self.follows:
            bookings = self._bookings.values()
            self.stream.mark(self, [each.claim(goes_on) for each in bookings if each.meter is None])
            if not self.reads_seldom:
                self.stream.read(asked_by=self)
        for booking in self._bookings.values():
            if (meter := booking.meter) is not None:
                self.stream.is_told_of_devices = True
                booking.account(self.stream.device_changes() if meter.is_cuda else None, goes_on)

    def start(self) -> None:
        """Follow the stream, and count what accelerators do from here on."""
        self._is_known = allocator.is_known()
        self.follows, self.n_ticks = True, 0
        self.stream.follow(self)

    def stop(self) -> None:
        """Follow the stream no more."""
        self.follows = self.stream.is_told_of_devices = False
        self.stream.leave(self)

    # --- told by the stream

    def look(self) -> None:
        """See `Consumer`."""
        self.mark(self._watches, goes_on=True)

    def take(self, claim: list[Visit | None], changes: list[int], level_bytes: int) -> None:
        """See `Consumer`."""
        usage = host_usage(changes, level_bytes, self._is_known) if changes else None
        for visit in claim:
            if visit is None:
                continue
            if usage is None:
                visit.reach(level_bytes, self._is_known)
            else:
                visit.add(usage)

    def miss(self, claim: list[Visit | None], was_bytes: int, level_bytes: int) -> None:
        """See `Consumer`."""
        for visit in claim:
            if visit is not None:
                visit.add(unseen_usage(was_bytes, level_bytes))


class _ThisThread(ThisThread):
    kind = Thread


class Engine(ABC):
    """The profilers that are open; a subclass reports the lines of some codes, as they run.

    Attributes:
        lock: held while profilers are opened and closed.
        watches: the profilers that are open.
        codes: those that they watch.
        on: whether the subclass reports; it says so.
        n_following: how many threads follow their streams.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.watches: tuple[Watch, ...] = ()
        self.codes: Codes = {}
        self.on = False
        self.n_following = 0
        self._local = _ThisThread()

    @property
    def thread(self) -> Thread:
        """The thread that asks."""
        found: Thread = self._local.found
        return found

    # --- what a subclass does

    @abstractmethod
    def start(self) -> None:
        """Begin to report.

        Raises:
            ProfilerUsageError: it can't.
        """

    @abstractmethod
    def join(self) -> None:
        """Report from this thread too, once another has started."""

    @abstractmethod
    def watch(self, before: Codes) -> None:
        """Report the codes and no others; unwatched ones, and those from before, only tick."""

    @abstractmethod
    def stop(self) -> None:
        """Report nothing more, but tick on threads that follow until they know that it is over."""

    # --- what profilers call

    def open(self, watch: Watch) -> None:
        """Begin to tell a profiler; one that is open is told of this thread as well."""
        with self.lock:
            self.thread.reads_seldom = True
            if watch in self.watches:
                self.join()
                return
            others = self.watches
            process.open()
            try:
                # It counts from what is live, which is known once sizes are kept. Its codes are
                # watched before the source starts, so that the frames that run are found at once.
                watch.begin()
                self.watches = (*others, watch)
                self.refresh()
                if others:
                    self.join()
                else:
                    # a profiler that nobody closes must not leave a session to the end
                    atexit.register(self.close_all)
                    self.start()
            except BaseException:
                self.watches = others
                self.refresh()
                self._end_if_last()
                raise

    def close(self, watch: Watch) -> None:
        """Tell a profiler no more; what happened up to now is told."""
        with self.lock:
            if watch not in self.watches:
                return
            thread = self.thread
            # It is told while it is still one of them; the session that only it wanted ends while
            # the source still runs, which ticks on threads that can't be reached from here.
            try:
                thread.mark(self.watches)
            finally:
                # an error of what is told must not leave the program traced
                self.watches = tuple(who for who in self.watches if who is not watch)
                try:
                    thread.know(self.watches)
                    self._stop_if_idle(thread)
                finally:
                    self.refresh()
                    self._end_if_last()

    def close_all(self) -> None:
        """Close every profiler, so that the interpreter ends without a session."""
        for watch in self.watches:
            self.close(watch)

    def refresh(self) -> None:
        """Report the codes that are watched now."""
        with self.lock:
            before = self.codes
            self.codes = {i: code for who in self.watches for i, code in who.codes.items()}
            if self.on:
                self.watch(before)

    def read(self) -> None:
        """Tell all that this thread did up to now, as far as its stream can be read."""
        thread = self.thread
        thread.mark(self.watches, goes_on=True)
        thread.stream.read(asked_by=thread)

    # --- what a subclass calls

    def enter(self, identity: int, code: CodeType, line: int) -> None:
        """A frame of a watched code begins, or goes on."""
        thread = self.thread
        thread.mark(self.watches)
        self._follow(thread)
        # A generator may go on in the middle of a line, and then does something before the next:
        # see test_what_a_generator_does_after_it_goes_on_is_of_the_line_that_it_waited_on.
        thread.entered = 0 if code.co_flags & SUSPENDS else identity
        key: Key = id(code), line
        for watch in self.watches:
            if key[0] in watch.codes:
                thread.booking_of(watch).enter(identity, key)

    def line(self, identity: int, code: CodeType, line: int) -> None:
        """A watched frame is about to run a line."""
        thread = self.thread
        # between the beginning of a frame and its first line nothing has run: no second mark
        if thread.entered != identity or not thread.follows:
            thread.mark(self.watches)
            self._follow(thread)
        thread.entered = 0
        key: Key = id(code), line
        for watch in self.watches:
            if key[0] in watch.codes:
                thread.booking_of(watch).line(identity, key)

    def leave(self, identity: int, code: CodeType, torn_down: bool) -> bool:
        """A watched frame ends or is suspended.

        Returns:
            Whether ``torn_down_now`` is wanted: the frame's variables are freed before the frame
            below goes on, and nothing else is.
        """
        thread = self.thread
        thread.mark(self.watches)
        for watch in self.watches:
            if id(code) in watch.codes:
                thread.booking_of(watch).leave(identity, torn_down)
        self._stop_if_idle(thread)
        return torn_down and thread.is_active

    def torn_down_now(self) -> None:
        """The frame that was left is gone, with its variables."""
        thread = self.thread
        thread.mark(self.watches)
        self._stop_if_idle(thread)

    def tick(self) -> None:
        """Something was called, or went once more around a loop, that nobody is told of."""
        thread = self.thread
        if thread.follows:
            thread.n_ticks += 1
            if thread.n_ticks >= TICKS_PER_TURN or not self.watches:
                self.turn(thread)
        elif not process.sizes_are_kept and self.watches:
            # This thread has just begun: what it makes has no session, and only c10's table has it.
            process.keep_needed_sizes(in_session=thread.stream.is_open)

    def turn(self, thread: Thread) -> None:
        """Keep the session of this thread short: enough may have happened in it."""
        if thread.stream.n_busy:
            return
        thread.n_ticks = 0
        self.read()
        # as when another thread has closed the last profiler: nobody else could end it
        self._stop_if_idle(thread)

    def _follow(self, thread: Thread) -> None:
        if thread.follows:
            thread.stream.resume()
            return
        with self.lock:
            self.n_following += 1
        thread.start()

    def _stop_if_idle(self, thread: Thread) -> None:
        if thread.follows and not thread.is_active:
            thread.stop()
            with self.lock:
                self.n_following -= 1

    def _end_if_last(self) -> None:
        if not self.watches:
            atexit.unregister(self.close_all)
            # the source first: what it reports from here on would find sizes no longer kept
            self.stop()
        process.close()
