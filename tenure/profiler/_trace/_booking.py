"""What each line of one profiler did, thread by thread.

A profiler listens through its `Watch`, which has a `Booking` on each thread. Before anything that
it is told happens, a look is taken: the booking says whose the time since the last look is, and
that `Visit` is told what was allocated in it, as soon as the thread's session is read.

Invariants: every interval goes to exactly one line, the one that the innermost watched frame is at,
so the lines of all watched functions together add up to what was allocated and freed in them. Only
the peak of a line covers what it called. Whose an interval is, is known when it ends; what happened
in it may be told later, in the same order. The books of all threads are kept for as long as the
watch lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType

import torch

from tenure._torch.allocations import Changes

from ._figures import Figures
from ._meters import CpuMeter, DeviceAccount, DeviceMeter, Interval, Usage, host_usage, unseen_usage

Key = tuple[int, int]
"""A line: the identity of its code, whose hash takes long, and its number."""
Codes = Mapping[int, CodeType]
"""Code objects by identity: their hashes take longer than a line's bookkeeping."""

Meter = CpuMeter | DeviceMeter
Place = tuple[int, int, torch.device]
"""A line as in ``Key``, and a device."""
Book = dict[Place, Figures]


@dataclass(slots=True)
class _Page:
    """The figures of one device's lines, and what was live on it when it was first looked at."""

    device: torch.device
    base_bytes: int
    lines: dict[Key, Figures] = field(default_factory=dict)

    def figures(self, key: Key) -> Figures:
        """Those of a line, made where there are none."""
        figures = self.lines.get(key)
        if figures is None:
            figures = self.lines[key] = Figures()
        return figures


class Visit:
    """A line that a frame is at, once: the claim to what happens until the next one.

    It is told once what happened, in order. Invariant: it has reached at least the peak of what it
    called.
    """

    __slots__ = ("_caller", "_figures", "_key", "_page", "_peak_bytes")

    def __init__(
        self, page: _Page, key: Key, caller: Visit | None, figures: Figures | None
    ) -> None:
        self._page = page
        self._key = key
        self._caller = caller
        # None for a frame that is at no line yet: it gets a row only if something happens there.
        self._figures = figures
        self._peak_bytes: int | None = None

    @property
    def place(self) -> Place:
        """The line, and the device that is measured."""
        return *self._key, self._page.device

    def take(self, changes: list[int], level_bytes: int, is_known: bool) -> None:
        """Book what happened in an interval of host memory.

        Args:
            changes: the bytes that were allocated (positive) and freed, in order; often none.
            level_bytes: what was live at the end.
            is_known: whether that is all threads' doing, and not just the sum of this one's.
        """
        peak_bytes = level_bytes - self._page.base_bytes
        if changes:
            self._add(host_usage(changes, peak_bytes, is_known))
            return
        if self._figures is not None:
            self._figures.reach(peak_bytes, is_known)
        self._rise(peak_bytes, is_known)

    def miss(self, was_bytes: int, level_bytes: int) -> None:
        """Book what the levels at both ends of an interval tell of it."""
        self._add(unseen_usage(was_bytes, level_bytes).above(self._page.base_bytes))

    def take_interval(self, interval: Interval) -> None:
        """Book what a meter has read."""
        self._add(interval.usage.above(self._page.base_bytes))
        if self._figures is not None and interval.after:
            self._figures.note_statistics(interval)

    def _add(self, usage: Usage) -> None:
        if self._figures is None and (usage.allocated_bytes or usage.freed_bytes):
            self._figures = self._page.figures(self._key)
        if self._figures is not None:
            self._figures.add(usage)
        self._rise(usage.peak_bytes, usage.peak_exact)

    def _rise(self, peak_bytes: int, exact: bool) -> None:
        """Have reached a peak, as those who called have; one as high before has told the others."""
        # A loop and no recursion: a profiled function may be at any depth of its own.
        visit: Visit | None = self
        while visit is not None:
            known = visit._peak_bytes
            if known is not None and known >= peak_bytes and exact:
                return
            visit._peak_bytes = peak_bytes if known is None else max(known, peak_bytes)
            if visit is not self:
                if visit._figures is None:
                    visit._figures = visit._page.figures(visit._key)
                visit._figures.reach(peak_bytes, exact)
            visit = visit._caller


@dataclass(slots=True)
class _Frame:
    """A watched frame that runs: which one, and the line that it is at."""

    identity: int
    visit: Visit


class Measured:
    """What one profiler measures, and since when.

    It stands apart from the ``Watch``, for the bookings to have it: if they had the watch, which
    has them, a profiler that is let go would be garbage. See test_a_profiler_leaves_no_garbage.

    Attributes:
        device: the device, as ``Watch.measure`` sets it.
        n_begun: how often the profiler was enabled.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n_begun = 0
        self._bases: dict[torch.device, int] = {}
        self._accounts: dict[torch.device, DeviceAccount] = {}

    def begin(self) -> None:
        """Count peaks from what is live now."""
        self.n_begun += 1
        self._bases.clear()
        self._accounts.clear()
        self.base_bytes(self.device)

    def new_meter(self, device: torch.device) -> Meter:
        """A meter for one thread; those of an accelerator share what its counters tell."""
        if device.type == "cpu":
            return CpuMeter()
        account = self._accounts.get(device)
        if account is None:
            # Two threads may come here at once: both get the one that was there first.
            account = self._accounts.setdefault(device, DeviceAccount(device))
        return DeviceMeter(account)

    def base_bytes(self, device: torch.device) -> int:
        """What was live on a device when it was first looked at, which peaks leave out."""
        if device not in self._bases:
            self._bases[device] = self.new_meter(device).level_bytes
        return self._bases[device]


class Booking:
    """Books what happens on one thread to the lines of one profiler: a part of a ``Watch``.

    Attributes:
        can_wait: whether it is told of host memory alone, which it claims at each look and may be
            told of later. Else it is given the events of every look at once.
        is_outdated: whether the watch wants something else than when this was last renewed.
    """

    def __init__(self, measured: Measured) -> None:
        self.can_wait: bool
        # Set by the watch, from whatever thread; an attribute, because each line asks.
        self.is_outdated = False
        self._measured = measured
        self._n_begun = measured.n_begun
        self._pages: dict[torch.device, _Page] = {}
        self._frames: list[_Frame] = []
        # Of the frame that is being torn down: what its variables held is freed on its last line.
        self._leaving: Visit | None = None
        self._aim()

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return self._page.device

    # --- told by the sessions and the engines; all calls come from its thread

    @property
    def is_active(self) -> bool:
        """Whether what happens now is a watched line's doing."""
        return bool(self._frames) or self._leaving is not None

    def renew(self) -> None:
        """Measure from here on what the profiler measures, against its base."""
        # First, so that a device that is set meanwhile is not missed.
        self.is_outdated = False
        self._meter.use(False)
        self._aim()
        self._tell_use()

    def forget_if_reopened(self) -> None:
        """Know of no frame, if what is known of one is from before the profiler was enabled."""
        if self._n_begun != self._measured.n_begun:
            self._n_begun = self._measured.n_begun
            self._frames.clear()
            self._leaving = None
            self.renew()

    def start(self) -> None:
        """Count from here."""
        self._meter.start()

    def claim(self) -> Visit | None:
        """Whose the time since the last look is; None where it is nobody's."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._tell_use()
            return leaving
        return self._frames[-1].visit if self._frames else None

    def account(self, changes: Changes | None) -> None:
        """Book what happened since the last look to the line that did it."""
        visit = self.claim()
        if visit is None:
            self._meter.start()
        else:
            visit.take_interval(self._meter.read(changes))

    def pass_by(self) -> None:
        """Book no bytes: what happens here is told to another thread, which books it."""
        visit, was_bytes = self.claim(), self._meter.level_bytes
        self._meter.start()
        if visit is not None:
            peak_bytes = max(was_bytes, self._meter.level_bytes)
            visit.take_interval(Interval(Usage(0, 0, peak_bytes, False, False)))

    def enter(self, identity: int, key: Key) -> None:
        """A watched frame begins, or goes on after a ``yield`` or an ``await``."""
        caller = self._frames[-1].visit if self._frames else None
        self._frames.append(_Frame(identity, Visit(self._page, key, caller, None)))
        self._tell_use()

    def line(self, identity: int, key: Key) -> None:
        """A watched frame begins with a line."""
        # A frame that ran before anyone watched has told of no beginning.
        if not self._unwind_to(identity):
            self.enter(identity, key)
        frame = self._frames[-1]
        figures = self._page.figures(key)
        figures.hits += 1
        frame.visit = Visit(self._page, key, frame.visit._caller, figures)

    def leave(self, identity: int, torn_down: bool) -> None:
        """A watched frame ends; with ``torn_down`` what its variables held is freed next."""
        if self._unwind_to(identity):
            frame = self._frames.pop()
            self._leaving = frame.visit if torn_down else None
            self._tell_use()

    # --- its book

    def book(self) -> Book:
        """The figures of each line that did something."""
        # Copies of both: other threads ask while this one goes on booking.
        return {
            (*key, device): figures
            for device, page in list(self._pages.items())
            for key, figures in list(page.lines.items())
        }

    def clear(self) -> None:
        """Begin a new book."""
        self._pages.clear()
        self._turn_to(_Page(self._page.device, self._page.base_bytes))

    def _aim(self) -> None:
        """Measure the profiler's device, and write on its page."""
        device = self._measured.device
        self._meter = self._measured.new_meter(device)
        # Events of the CPU are this thread's own, and say all; those of another device don't say
        # whose they are, so its counters are read at every look.
        self.can_wait = device.type == "cpu"
        known = self._pages.get(device)
        lines = {} if known is None else known.lines
        self._turn_to(_Page(device, self._measured.base_bytes(device), lines))

    def _turn_to(self, page: _Page) -> None:
        """Write on another page; what is told later of the time before goes to the old one."""
        self._page = self._pages[page.device] = page
        caller = None
        for frame in self._frames:
            caller = frame.visit = Visit(page, frame.visit._key, caller, None)

    def _tell_use(self) -> None:
        if not self.can_wait:
            self._meter.use(self.is_active)

    def _unwind_to(self, identity: int) -> bool:
        """Whether the frame is known; inner ones whose end nobody told are dropped."""
        if self._frames and self._frames[-1].identity == identity:
            return True
        if all(frame.identity != identity for frame in self._frames):
            return False
        while self._frames[-1].identity != identity:
            self._frames.pop()
        return True


class Watch:
    """What one profiler looks at: some codes, one device, and a book for each thread.

    Attributes:
        codes: the codes whose lines are booked, by identity.
        measured: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: Codes = {}
        self.measured = Measured(device)
        self._bookings: list[Booking] = []
        self._unread: list[Callable[[], list[Visit]]] = []

    # --- told from when it is opened until it is closed

    def begin(self) -> None:
        """Count peaks from what is live now, and no frame as running."""
        self.measured.begin()

    def on_thread(self, unread: Callable[[], list[Visit]]) -> Booking:
        """The booking of a thread that has none, and that has this left to tell; all may ask it."""
        booking = Booking(self.measured)
        self._bookings.append(booking)
        # After it can be found: a device that another thread sets meanwhile is seen here or there.
        if booking.device is not self.measured.device:
            booking.is_outdated = True
        self._unread.append(unread)
        return booking

    # --- for the profiler

    def measure(self, device: torch.device) -> None:
        """Measure another device, on each thread from its next line on."""
        if device is not self.measured.device:
            self.measured.device = device
            for booking in self._bookings:
                booking.is_outdated = True

    def books(self) -> list[Book]:
        """The book of each thread."""
        return [booking.book() for booking in self._bookings]

    def unread(self) -> set[Place]:
        """The lines that a thread has more to tell of, once it reads its session."""
        return {visit.place for unread in self._unread for visit in unread()}

    def clear(self) -> None:
        """Begin new books."""
        for booking in self._bookings:
            booking.clear()
