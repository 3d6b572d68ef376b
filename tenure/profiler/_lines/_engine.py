"""Where profilers are opened, and lines that run are booked: the base of the two sources of lines.

Invariant: before a profiler is told of a line, a mark is set in the stream of the thread, so what
the allocator did until then goes to what ran until then.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from itertools import accumulate
from types import CodeType

from tenure._stream import ThisThread, process, this_stream
from tenure._torch import cpu_allocator as allocator

from ._book import Book, Codes, Frames, LineVisit, Usage, unseen_usage

TICKS_PER_TURN = 128
"""After how many ticks of a thread its session is read."""


class WatchedThread:
    """The watched frames of one thread: a consumer of its stream.

    Attributes:
        stream: that of the thread.
        number: that of the thread.
        n_ticks: how often it ticked since its session was read.
        follows: whether it is told what the stream tells.
        is_known: whether the levels that it tells are those of c10.
    """

    def __init__(self) -> None:
        self.stream = this_stream()
        self.number = threading.get_ident()
        self.n_ticks = 0
        self.follows = self.is_known = False
        self._books: tuple[Book, ...] = ()

    def mark(self, books: tuple[Book, ...], *, goes_on: bool = False) -> None:
        """Claim what happened since the last mark for the lines that did it.

        Args:
            books: those of the profilers that are open.
            goes_on: whether the line goes on with what it does, such as freeing variables.
        """
        self._books = books
        claim = []
        for book in books:
            frames = book.frames.get(self.number)
            claim.append(None if frames is None else frames.claim(goes_on))
        if self.follows:
            self.stream.mark(self, claim)
        for i, book in enumerate(books):
            if book.is_metered:
                book.count(claim[i], self.stream)

    # --- told by the stream

    def look(self) -> None:
        """See `Consumer`."""
        self.mark(self._books, goes_on=True)

    def take(self, claim: list[LineVisit | None], changes: list[int], level_bytes: int) -> None:
        """See `Consumer`."""
        usage = None
        # most lines allocate nothing
        if changes:
            net = sum(changes)
            allocated = sum([n_bytes for n_bytes in changes if n_bytes > 0])
            peak = level_bytes - net + max(accumulate(changes, initial=0))
            usage = Usage(allocated, allocated - net, peak, True, self.is_known)
        for visit in claim:
            if visit is None or visit.account.meter is not None:
                continue
            if usage is None:
                visit.reach(level_bytes, self.is_known)
            else:
                visit.add(usage)

    def miss(self, claim: list[LineVisit | None], was_bytes: int, level_bytes: int) -> None:
        """See `Consumer`."""
        for visit in claim:
            if visit is not None and visit.account.meter is None:
                visit.add(unseen_usage(was_bytes, level_bytes))


class _LineThread(ThisThread):
    kind = WatchedThread


class LineEngine(ABC):
    """The profilers that are open; a subclass reports the lines of some codes, as they run.

    Attributes:
        lock: held while profilers are opened and closed.
        books: those of the profilers that are open.
        codes: those that they watch.
        on: whether the subclass reports.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.books: tuple[Book, ...] = ()
        self.codes: Codes = {}
        self.on = False
        self._n_following = 0
        self._local = _LineThread()

    @property
    def thread(self) -> WatchedThread:
        """The thread that asks."""
        found: WatchedThread = self._local.found
        return found

    # --- what a subclass does

    @abstractmethod
    def start(self) -> None:
        """Begin to report, or report from this thread too, once another has started.

        Raises:
            ProfilerUsageError: it can't.
        """

    @abstractmethod
    def watch(self, before: Codes) -> None:
        """Report the codes and no others; unwatched ones, and those from before, only tick."""

    @abstractmethod
    def stop(self) -> None:
        """Report nothing more; also of a start that failed."""

    # --- what profilers call

    def open(self, book: Book) -> None:
        """Begin to tell a profiler; one that is open is told of this thread as well."""
        with self.lock:
            if book in self.books:
                self.start()
                return
            process.open()
            try:
                # It counts from what is live, which is known once sizes are kept. Its codes are
                # watched before the source starts, so that the frames that run are found at once.
                book.begin()
                self.books = (*self.books, book)
                self.refresh()
                self.on = True
                self.start()
            except BaseException:
                self._drop(book)
                raise

    def close(self, book: Book) -> None:
        """Tell a profiler no more; what happened up to now is told."""
        with self.lock:
            if book not in self.books:
                return
            try:
                self.thread.mark(self.books)
            finally:
                # an error of what is told must not leave the program traced
                self._drop(book)

    def close_all(self) -> None:
        """Close every profiler, so that the interpreter ends without a session."""
        for book in self.books:
            self.close(book)

    def refresh(self) -> None:
        """Report the codes that are watched now."""
        with self.lock:
            before = self.codes
            self.codes = {i: code for book in self.books for i, code in book.codes.items()}
            if self.on:
                self.watch(before)

    def read(self) -> None:
        """Tell all that this thread did up to now, as far as its stream can be read."""
        thread = self.thread
        thread.mark(self.books, goes_on=True)
        thread.stream.read(asked_by=thread)

    # --- what a subclass calls

    def line(self, identity: int, code: CodeType, line: int, hits: int = 1) -> None:
        """Begin a line of a watched frame, or (with no hit) resume one."""
        thread = self.thread
        thread.mark(self.books)
        if thread.follows:
            thread.stream.resume()
        else:
            with self.lock:
                self._n_following += 1
            thread.follows, thread.is_known, thread.n_ticks = True, allocator.is_known(), 0
            thread.stream.follow(thread)
        key = id(code), line
        for book in self.books:
            if key[0] in book.codes:
                frames = book.frames.get(thread.number)
                if frames is None:
                    frames = book.frames[thread.number] = Frames()
                frames.line(identity, book.account, key, hits)

    def leave(self, identity: int, code: CodeType, torn_down: bool) -> bool:
        """Return a watched frame ends or is suspended.

        Returns:
            Whether ``torn_down_now`` is wanted: the frame's variables are freed before the frame
            below goes on, and nothing else is.
        """
        thread = self.thread
        thread.mark(self.books)
        for book in self.books:
            if id(code) in book.codes and (frames := book.frames.get(thread.number)):
                frames.leave(identity, torn_down)
        return not self._stop_if_idle(thread) and torn_down

    def torn_down_now(self) -> None:
        """Note that the frame that ended has freed its variables."""
        thread = self.thread
        thread.mark(self.books)
        self._stop_if_idle(thread)

    def tick(self) -> None:
        """Something was called that nobody is told of: keep the session of this thread short."""
        thread = self.thread
        if thread.follows:
            thread.n_ticks += 1
            is_over = thread.n_ticks >= TICKS_PER_TURN or not self.books
            if is_over and not thread.stream.n_busy:
                thread.n_ticks = 0
                self.read()
                # as when another thread has closed the last profiler: nobody else could end it
                self._stop_if_idle(thread)

    def _stop_if_idle(self, thread: WatchedThread) -> bool:
        """Follow the stream no more if no watched line runs; return whether none does."""
        all_frames = [book.frames.get(thread.number) for book in self.books]
        if any(frames and frames.is_active for frames in all_frames):
            return False
        if thread.follows:
            thread.follows = thread.stream.is_told_of_devices = False
            thread.stream.leave(thread)
            with self.lock:
                self._n_following -= 1
                self._stop_if_last()
        return True

    def _drop(self, book: Book) -> None:
        self.books = tuple(each for each in self.books if each is not book)
        book.frames.pop(self.thread.number, None)
        try:
            self._stop_if_idle(self.thread)
        finally:
            self.refresh()
            self._stop_if_last()
            process.close()

    def _stop_if_last(self) -> None:
        # a thread that follows needs ticks to end its session
        if self.on and not self.books and not self._n_following:
            self.on = False
            self.stop()
