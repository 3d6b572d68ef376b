"""One thread's way through the lines that one profiler watches.

Invariant: every interval goes to exactly one line, the one that the innermost watched frame is at,
so the lines of all watched functions together add up to what was allocated and freed in them. Only
the peak of a line covers what it called. Whose an interval is, is known when it ends; what happened
in it may be told later, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tenure._torch.allocations import Changes

from .._allocator import CpuMeter, DeviceMeter, Interval, Stats, keep_largest

Meter = CpuMeter | DeviceMeter
Key = tuple[int, int]
"""A line: the identity of its code, whose hash takes long, and its number."""


@dataclass(slots=True)
class Figures:
    """What one line did, over all its hits; bytes as in LineRecord."""

    hits: int = 0
    allocated_bytes: int = 0
    freed_bytes: int = 0
    peak_bytes: int | None = None
    exact: bool = True
    peak_exact: bool = True
    statistics: dict[str, int] = field(default_factory=dict)
    is_shared: bool = False
    _last: Stats = field(default_factory=dict, compare=False)

    def add(self, interval: Interval) -> None:
        """Take an interval in; of statistics each field's largest value."""
        self.allocated_bytes += interval.allocated_bytes
        self.freed_bytes += interval.freed_bytes
        self.exact &= interval.exact
        self.is_shared |= interval.is_shared
        if interval.after:
            keep_largest(self.statistics, self._last, interval.before, interval.after)
            self._last = interval.after

    def reach(self, peak_bytes: int, exact: bool) -> None:
        """Take a peak in; one that is only a bound makes the largest a bound."""
        if self.peak_bytes is None or peak_bytes > self.peak_bytes:
            self.peak_bytes = peak_bytes
        self.peak_exact &= exact

    def merge(self, other: Figures) -> None:
        """Take in what the same line did on another thread."""
        self.hits += other.hits
        self.allocated_bytes += other.allocated_bytes
        self.freed_bytes += other.freed_bytes
        self.exact &= other.exact
        self.is_shared |= other.is_shared
        if other.peak_bytes is not None:
            self.reach(other.peak_bytes, other.peak_exact)
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
    """A line that a frame is at, once: what happens until the next one is booked to it.

    Invariant: it has reached at least the peak of what it called.
    """

    __slots__ = ("_caller", "_figures", "_key", "_page", "_peak_bytes")

    def __init__(
        self, page: _Page, key: Key, caller: Visit | None, figures: Figures | None
    ) -> None:
        self._page = page
        self._key = key
        self._caller = caller
        self._figures = figures
        self._peak_bytes: int | None = None

    def take(self, interval: Interval) -> None:
        """Book what happened in an interval."""
        if interval.allocated_bytes or interval.freed_bytes:
            if self._figures is None:
                self._figures = self._page.figures(self._key)
            self._figures.add(interval)
        elif self._figures is not None:
            self._figures.add(interval)
        self._rise(interval.peak_bytes - self._page.base_bytes, interval.peak_exact)

    def stay(self, level_bytes: int, is_known: bool) -> None:
        """Book that nothing happened, at a level."""
        self._rise(level_bytes - self._page.base_bytes, is_known)

    @property
    def place(self) -> Place:
        """The line, and the device that is measured."""
        return *self._key, self._page.device

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


class Lane:
    """Books what happens on one thread to the lines of one profiler.

    Attributes:
        n_begun: as in Watch, when its frames were last known.
        meter: what measures the device.
        asked_for: the device as the profiler names it: the very object.
        on_host: whether that is the CPU, whose events can be booked later.
    """

    def __init__(self, meter: Meter, base_bytes: int, n_begun: int) -> None:
        self.n_begun = n_begun
        self.meter = meter
        self.on_host = meter.device.type == "cpu"
        self.asked_for: torch.device | None = None
        self._pages = {meter.device: _Page(meter.device, base_bytes)}
        self._page = self._pages[meter.device]
        self._frames: list[_Frame] = []
        self._leaving: Visit | None = None  # of the frame that is being torn down

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return self.meter.device

    @property
    def active(self) -> bool:
        """Whether what happens now is a watched line's doing."""
        return bool(self._frames) or self._leaving is not None

    def book(self) -> Book:
        """The figures of each line that did something."""
        return {
            (*key, device): figures
            for device, page in list(self._pages.items())
            for key, figures in list(page.lines.items())
        }

    def aim(self, meter: Meter, base_bytes: int) -> None:
        """Measure another device from here on, or the same against another base."""
        self.meter.use(False)
        self.meter = meter
        self.on_host = meter.device.type == "cpu"
        self._tell_use()
        known = self._pages.get(meter.device)
        lines = {} if known is None else known.lines
        self._turn_to(_Page(meter.device, base_bytes, lines))

    def account(self, changes: Changes | None) -> None:
        """Book what happened since the last look to the line that did it."""
        visit = self.look()
        if visit is None:
            self.meter.start()
        else:
            visit.take(self.meter.read(changes))

    def pass_by(self) -> None:
        """Book no bytes: what happens here is told to another thread, which books it."""
        visit, was_bytes = self.look(), self.meter.level_bytes
        self.meter.start()
        if visit is not None:
            peak_bytes = max(was_bytes, self.meter.level_bytes)
            visit.take(Interval(0, 0, peak_bytes, False, False))

    def look(self) -> Visit | None:
        """Whose the time since the last look is; None where it is nobody's."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._tell_use()
            return leaving
        return self._frames[-1].visit if self._frames else None

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

    def forget(self, n_begun: int) -> None:
        """Know of no frame: what is said of one was said before the profiler was enabled anew."""
        self._frames.clear()
        self._leaving = None
        self.n_begun = n_begun
        self._tell_use()

    def clear(self) -> None:
        """Begin a new book."""
        self._pages.clear()
        self._turn_to(_Page(self._page.device, self._page.base_bytes))

    def _tell_use(self) -> None:
        if not self.on_host:
            self.meter.use(self.active)

    def _turn_to(self, page: _Page) -> None:
        """Write on another page; what is told later of the time before goes to the old one."""
        self._page = self._pages[self.meter.device] = page
        caller = None
        for frame in self._frames:
            caller = frame.visit = Visit(page, frame.key, caller, None)

    def _unwind_to(self, identity: int) -> bool:
        """Whether the frame is known; inner ones whose end nobody told are dropped."""
        if self._frames and self._frames[-1].identity == identity:
            return True
        if all(frame.identity != identity for frame in self._frames):
            return False
        while self._frames[-1].identity != identity:
            self._frames.pop()
        return True
