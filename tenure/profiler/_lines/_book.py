"""What each line of one profiler did, thread by thread.

A profiler has a `Watch`, which has a `Booking` for each thread. When anything happens to a watched
frame, the booking says whose the time since the last mark is, and that `Visit` is told later what
was allocated in it.

Invariants: every interval goes to exactly one line, the one that the innermost watched frame is at,
so the lines of all watched functions together add up to what was allocated and freed in them. Only
the peak of a line covers what it called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import CodeType
from typing import Any

import torch

from tenure._stream import Stats
from tenure._torch import cpu_allocator as allocator

from ._device_meter import DeviceAccount, DeviceMeter, Usage, keep_largest

Key = tuple[int, int]
"""A line: the identity of its code, whose hash takes long, and its number."""
Codes = Mapping[int, CodeType]
"""Code objects by identity."""
Book = dict[tuple[int, int, torch.device], "Figures"]


@dataclass(slots=True)
class Figures:
    """What one line did, over all its hits; see `LineRecord`.

    Attributes:
        peak_bytes: None as long as nothing was booked.
        last: the statistics of the device when they were last looked at.
    """

    hits: int = 0
    allocated_bytes: int = 0
    freed_bytes: int = 0
    peak_bytes: int | None = None
    exact: bool = True
    peak_exact: bool = True
    shared: bool = False
    statistics: dict[str, int] = field(default_factory=dict)
    last: Stats = field(default_factory=dict, compare=False)

    def add(self, usage: Usage) -> None:
        """Take an interval in."""
        self.allocated_bytes += usage.allocated_bytes
        self.freed_bytes += usage.freed_bytes
        self.exact &= usage.exact
        self.shared |= usage.shared

    def reach(self, peak_bytes: int, exact: bool) -> None:
        """Take a peak in. One that is only a bound makes the largest a bound."""
        if self.peak_bytes is None or peak_bytes > self.peak_bytes:
            self.peak_bytes = peak_bytes
        self.peak_exact &= exact

    def merge(self, other: Figures) -> None:
        """Take in what the same line did on another thread."""
        self.hits += other.hits
        self.add(
            Usage(other.allocated_bytes, other.freed_bytes, 0, other.exact, True, other.shared)
        )
        if other.peak_bytes is not None:
            self.reach(other.peak_bytes, other.peak_exact)
        for name, value in other.statistics.items():
            self.statistics[name] = max(value, self.statistics.get(name, value))


class _Page:
    """The figures of the lines on one device, and what was live there when it was first seen."""

    __slots__ = ("base_bytes", "device", "lines")

    def __init__(self, device: torch.device, base_bytes: int) -> None:
        self.device = device
        self.base_bytes = base_bytes
        self.lines: dict[Key, Figures] = {}

    def figures(self, key: Key) -> Figures:
        found = self.lines.get(key)
        if found is None:
            found = self.lines[key] = Figures()
        return found


class Visit:
    """A line that a frame is at, once: the claim to what happens until the next one.

    Invariant: it has reached at least the peak of what it called.
    """

    __slots__ = ("caller", "figures", "key", "page", "peak_bytes")

    def __init__(
        self, page: _Page, key: Key, caller: Visit | None, figures: Figures | None
    ) -> None:
        self.page = page
        self.key = key
        self.caller = caller
        # None for a frame that is at no line yet: it gets a row only if something happens there
        self.figures = figures
        self.peak_bytes: int | None = None

    def add(self, usage: Usage) -> None:
        """Book what happened; its peak is counted from nothing."""
        if usage.allocated_bytes or usage.freed_bytes:
            if self.figures is None:
                self.figures = self.page.figures(self.key)
            self.figures.add(usage)
        elif self.figures is not None and not usage.exact:
            self.figures.add(usage)
        self.reach(usage.peak_bytes, usage.peak_exact)

    def reach(self, level_bytes: int, exact: bool) -> None:
        """Have reached a level, as those who called have; one as high before has told them."""
        peak_bytes = level_bytes - self.page.base_bytes
        if self.figures is not None:
            self.figures.reach(peak_bytes, exact)
        # a loop and no recursion: a profiled function may be at any depth of its own
        visit: Visit | None = self
        while visit is not None:
            known = visit.peak_bytes
            if known is not None and known >= peak_bytes and exact:
                return
            visit.peak_bytes = peak_bytes if known is None else max(known, peak_bytes)
            if visit is not self:
                if visit.figures is None:
                    visit.figures = visit.page.figures(visit.key)
                visit.figures.reach(peak_bytes, exact)
            visit = visit.caller


def host_usage(changes: list[int], level_bytes: int, is_known: bool) -> Usage:
    """Return the usage of an interval of host memory.

    Args:
        changes: what was allocated (positive) and freed in it, in order.
        level_bytes: what was live at its end.
        is_known: whether that is what c10 says, and not the sum of what this thread did.
    """
    net = sum(changes)
    allocated = sum([n_bytes for n_bytes in changes if n_bytes > 0])
    peak = level_bytes - net + max(accumulate(changes, initial=0))
    return Usage(allocated, allocated - net, peak, True, is_known)


class Booking:
    """The watched frames of one thread, for one profiler.

    It has no reference to the watch, which has it: a profiler that nobody holds would be garbage.
    See test_a_profiler_leaves_no_garbage.

    Attributes:
        meter: what reads the counters of an accelerator; None for the host, whose events are told.
        unread: returns the claims of the thread that are not told yet.
    """

    _page: _Page

    def __init__(self, watch: Watch, unread: Callable[[], list[Any]]) -> None:
        self.unread = unread
        self.meter: DeviceMeter | None = None
        self._n_begun = 0
        self._pages: dict[torch.device, _Page] = {}
        # each with its identity and the line that it is at
        self._frames: list[tuple[int, Visit]] = []
        # Of the frame that is being torn down: what its variables held is freed on its last line.
        self._leaving: Visit | None = None
        self.follow(watch)

    @property
    def is_active(self) -> bool:
        """Whether what happens now is a watched line's doing."""
        return bool(self._frames) or self._leaving is not None

    def follow(self, watch: Watch) -> None:
        """Measure from here on what the profiler measures now."""
        device = watch.device
        if self._n_begun != watch.n_begun:
            # what is known of frames is from before the profiler was enabled
            self._n_begun, self._leaving = watch.n_begun, None
            self._frames.clear()
        elif self._page.device is device:
            return
        if self.meter is not None:
            self.meter.use(False)
        account, base_bytes = watch.origin(device)
        self.meter = None if account is None else DeviceMeter(account)
        page = _Page(device, base_bytes)
        if (known := self._pages.get(device)) is not None:
            page.lines = known.lines
        self._turn_to(page)
        self._tell_use()

    def claim(self, goes_on: bool) -> Visit | None:
        """Return whose the time since the last mark is; None if it is nobody's.

        Args:
            goes_on: whether it is a mark in the midst of what a line does.
        """
        leaving = self._leaving
        if leaving is not None:
            if not goes_on:
                self._leaving = None
                self._tell_use()
            return leaving
        return self._frames[-1][1] if self._frames else None

    def account(self, changes: list[int] | None, goes_on: bool) -> None:
        """Book what the counters of an accelerator tell since they were last read.

        Args:
            goes_on: see `claim`.
            changes: the events of this thread, where the backend tells them and they were seen.
        """
        visit, meter = self.claim(goes_on), self.meter
        assert meter is not None
        if visit is None:
            meter.start()
            return
        visit.add(meter.read(changes))
        if (figures := visit.figures) is not None:
            keep_largest(figures.statistics, figures.last, meter.before, meter.after)
            figures.last = meter.after

    def enter(self, identity: int, key: Key) -> None:
        """A watched frame begins, or goes on after a ``yield`` or an ``await``."""
        caller = self._frames[-1][1] if self._frames else None
        self._frames.append((identity, Visit(self._page, key, caller, None)))
        self._tell_use()

    def line(self, identity: int, key: Key) -> None:
        """A watched frame begins with a line."""
        # a frame that ran before anyone watched has told of no beginning
        if not self._unwind_to(identity):
            self.enter(identity, key)
        figures = self._page.figures(key)
        figures.hits += 1
        caller = self._frames[-1][1].caller
        self._frames[-1] = identity, Visit(self._page, key, caller, figures)

    def leave(self, identity: int, torn_down: bool) -> None:
        """A watched frame ends; with ``torn_down`` what its variables held is freed next."""
        if self._unwind_to(identity):
            visit = self._frames.pop()[1]
            self._leaving = visit if torn_down else None
            self._tell_use()

    def book(self) -> Book:
        """Return the figures of each line that did something."""
        # copies of both: other threads ask while this one goes on booking
        return {
            (*key, device): figures
            for device, page in list(self._pages.items())
            for key, figures in list(page.lines.items())
        }

    def clear(self) -> None:
        """Begin a new book."""
        self._pages.clear()
        self._turn_to(_Page(self._page.device, self._page.base_bytes))

    def _turn_to(self, page: _Page) -> None:
        """Write on another page; what is told later of the time before goes to the old one."""
        self._page = self._pages[page.device] = page
        caller = None
        for i, (identity, visit) in enumerate(self._frames):
            caller = Visit(page, visit.key, caller, None)
            self._frames[i] = identity, caller

    def _tell_use(self) -> None:
        if self.meter is not None:
            self.meter.use(self.is_active)

    def _unwind_to(self, identity: int) -> bool:
        """Whether the frame is known; inner ones whose end nobody told are dropped."""
        frames = self._frames
        if frames and frames[-1][0] == identity:
            return True
        if all(each != identity for each, _ in frames):
            return False
        while frames[-1][0] != identity:
            frames.pop()
        return True


class Watch:
    """The measurement of one profiler: some codes, one device, and a booking for each thread.

    Attributes:
        codes: the codes whose lines are measured.
        device: the device, which may change at any time.
        n_begun: how often the profiler was enabled.
        bookings: those of all threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: Codes = {}
        self.device = device
        self.n_begun = 0
        self.bookings: list[Booking] = []
        self._origins: dict[torch.device, tuple[DeviceAccount | None, int]] = {}

    def begin(self) -> None:
        """Count peaks from what is live now."""
        self.n_begun += 1
        self._origins.clear()
        self.origin(self.device)

    def origin(self, device: torch.device) -> tuple[DeviceAccount | None, int]:
        """Return what a device was like when it was first looked at.

        Returns:
            What all threads share of an accelerator, None for the host; and what was live, which
            peaks leave out.
        """
        found = self._origins.get(device)
        if found is None:
            account = None if device.type == "cpu" else DeviceAccount(device)
            base_bytes = allocator.live_bytes() if account is None else account.live_bytes
            # two threads may come here at once: both get the one that was there first
            found = self._origins.setdefault(device, (account, base_bytes))
        return found

    def book(self) -> Book:
        """Return what all threads did; a line of which more is to be told is not exact."""
        merged: Book = {}
        for booking in self.bookings:
            for key, figures in booking.book().items():
                merged.setdefault(key, Figures()).merge(figures)
        # The session of another thread can't be read from here. See
        # test_lines_that_another_thread_has_not_told_yet_are_lower_bounds.
        for booking in self.bookings:
            for claims in booking.unread():
                for visit in claims if type(claims) is list else ():
                    found = visit and merged.get((*visit.key, visit.page.device))
                    if found:
                        found.exact = found.peak_exact = False
        return merged
