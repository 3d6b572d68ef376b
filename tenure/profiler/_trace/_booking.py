"""Lines as a listener: what each of a profiler's lines did, on each thread.

Invariant: every interval goes to exactly one line, the one that the innermost watched frame is at,
so the lines of all watched functions together add up to what was allocated and freed in them. Only
the peak of a line covers what it called. Whose an interval is, is known when it ends; what happened
in it may be told later, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tenure._torch.allocations import Changes

from .._allocator import (
    CpuMeter,
    DeviceAccount,
    DeviceMeter,
    Interval,
    Stats,
    Usage,
    host_usage,
    keep_largest,
    unseen_usage,
)
from ._listeners import Codes, Key, Unread

Meter = CpuMeter | DeviceMeter


@dataclass(slots=True)
class Figures:
    """What one line did, over all its hits.

    Attributes:
        hits: how often it was begun.
        usage: the sum of what was booked to it; None as long as nothing was.
        statistics: of each field of the device's the largest value.
    """

    hits: int = 0
    usage: Usage | None = None
    statistics: dict[str, int] = field(default_factory=dict)
    _last: Stats = field(default_factory=dict, compare=False)

    def add(self, usage: Usage) -> None:
        """Take an interval in."""
        known = self.usage
        self.usage = usage if known is None else known + usage

    def reach(self, peak_bytes: int, exact: bool) -> None:
        """Take a peak in, and nothing that was allocated or freed."""
        known = self.usage
        # Most lines are at a level that they have been at: nothing to add then.
        if known is None or peak_bytes > known.peak_bytes or not exact:
            self.add(Usage(0, 0, peak_bytes, True, exact))

    def note_statistics(self, interval: Interval) -> None:
        """Keep what the fields of the device reached in an interval."""
        keep_largest(self.statistics, self._last, interval.before, interval.after)
        self._last = interval.after

    def merge(self, other: Figures) -> None:
        """Take in what the same line did on another thread."""
        self.hits += other.hits
        if other.usage is not None:
            self.add(other.usage)
        for name, value in other.statistics.items():
            self.statistics[name] = max(value, self.statistics.get(name, value))


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

    Invariant: it has reached at least the peak of what it called.
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
        """Book what happened in an interval of host memory."""
        peak_bytes = level_bytes - self._page.base_bytes
        if changes:
            self._add(host_usage(changes, peak_bytes, is_known))
        else:
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
        """Reach a peak, as do those who called; one that was as high has told the others."""
        visit: Visit | None = self
        while visit is not None:
            known = visit._peak_bytes
            if known is not None and known >= peak_bytes and exact:
                return
            visit._peak_bytes = peak_bytes if known is None else max(known, peak_bytes)
            if visit is not self and visit._figures is None:
                visit._figures = visit._page.figures(visit._key)
            if visit._figures is not None:
                visit._figures.reach(peak_bytes, exact)
            visit = visit._caller


@dataclass(slots=True)
class _Frame:
    """A watched frame that runs: which one, and the line that it is at."""

    identity: int
    key: Key
    visit: Visit


class Measured:
    """What one profiler measures, and since when.

    It stands apart from the ``Watch``, for the bookings to have it: if they had the watch, which
    has them, a profiler that is let go would be garbage. See test_a_profiler_leaves_no_garbage.

    Attributes:
        device: the device; it may be set while functions run.
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
    """Books what happens on one thread to the lines of one profiler: a part of a ``Watch``."""

    def __init__(self, measured: Measured) -> None:
        self.can_wait: bool
        self._measured = measured
        self._n_begun = measured.n_begun
        self._pages: dict[torch.device, _Page] = {}
        self._frames: list[_Frame] = []
        # Of the frame that is being torn down: what its variables held is freed on its last line.
        self._leaving: Visit | None = None
        self._aim()

    # --- as a ThreadListener

    @property
    def is_active(self) -> bool:
        """Whether what happens now is a watched line's doing."""
        return bool(self._frames) or self._leaving is not None

    @property
    def is_outdated(self) -> bool:
        """Whether the profiler measures another device by now: one that is equal may be new."""
        return self._device is not self._measured.device

    def renew(self) -> None:
        """Measure from here on what the profiler measures, against its base."""
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
        self._frames.append(_Frame(identity, key, Visit(self._page, key, caller, None)))
        self._tell_use()

    def line(self, identity: int, key: Key) -> None:
        """A watched frame begins with a line."""
        if not self._unwind_to(identity):  # it ran before anyone watched
            self.enter(identity, key)
        frame = self._frames[-1]
        figures = self._page.figures(key)
        figures.hits += 1
        frame.key, frame.visit = key, Visit(self._page, key, frame.visit._caller, figures)

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
        self._device = device = self._measured.device
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
            caller = frame.visit = Visit(page, frame.key, caller, None)

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

    Invariant: the books of all threads are kept for as long as this lives.

    Attributes:
        codes: the codes whose lines are booked, by identity.
        measured: the device, which each thread's part turns to by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: Codes = {}
        self.measured = Measured(device)
        self._bookings: list[Booking] = []
        self._unread: list[Unread] = []

    # --- as a Listener

    def begin(self) -> None:
        """Count peaks from what is live now, and no frame as running."""
        self.measured.begin()

    def on_thread(self, unread: Unread) -> Booking:
        """The booking of a thread that has none, and that has this left to tell."""
        booking = Booking(self.measured)
        self._bookings.append(booking)
        self._unread.append(unread)
        return booking

    # --- for the profiler

    def books(self) -> list[Book]:
        """The book of each thread."""
        return [booking.book() for booking in self._bookings]

    def unread(self) -> set[Place]:
        """The lines that a thread has more to tell of, once it reads its session."""
        claims = [claim for unread in self._unread for claim in unread.claims()]
        return {claim.place for claim in claims if isinstance(claim, Visit)}

    def clear(self) -> None:
        """Begin new books."""
        for booking in self._bookings:
            booking.clear()
