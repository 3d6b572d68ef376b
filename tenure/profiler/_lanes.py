"""One thread's way through the lines that one profiler watches.

Invariant: every interval goes to exactly one line, the one that the innermost watched frame is at,
so the lines of all watched functions together add up to what was allocated and freed in them. Only
the peak of a line covers what it called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ._meters import Interval, Meter
from ._torch_allocations import Changes

CPU = torch.device("cpu")

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

    def add(self, interval: Interval) -> None:
        """Take an interval in; of statistics each field's largest value."""
        self.allocated_bytes += interval.allocated_bytes
        self.freed_bytes += interval.freed_bytes
        self.exact &= interval.exact
        for name, value in interval.statistics.items():
            self.statistics[name] = max(value, self.statistics.get(name, value))

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
        if other.peak_bytes is not None:
            self.reach(other.peak_bytes, other.peak_exact)
        for name, value in other.statistics.items():
            self.statistics[name] = max(value, self.statistics.get(name, value))


class Booking(NamedTuple):
    """Whose an interval is that can be told only later: a line, and the lines that called it."""

    key: Key
    callers: tuple[Key, ...]
    base_bytes: int


Book = dict[tuple[int, int, torch.device], Figures]


@dataclass(slots=True)
class _Frame:
    """A watched frame that runs: which one, where it is, and the most that was live since.

    The figures are those of its line, once there are any.
    """

    identity: int
    key: Key
    figures: Figures | None = None
    peak: tuple[int, bool] | None = None


class Lane:
    """Books what happens on one thread to the lines of one profiler.

    Attributes:
        book: the figures of each line that did something.
        n_begun: as in Watch, when its frames were last known.
    """

    def __init__(self, meter: Meter, base_bytes: int, n_begun: int) -> None:
        self.book: Book = {}
        self.n_begun = n_begun
        self._meter = meter
        self._base_bytes = base_bytes
        self._frames: list[_Frame] = []
        self._leaving: _Frame | None = None  # the one that is being torn down

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return self._meter.device

    @property
    def active(self) -> bool:
        """Whether what happens now is a watched line's doing."""
        return bool(self._frames) or self._leaving is not None

    def aim(self, meter: Meter, base_bytes: int) -> None:
        """Measure another device from here on."""
        self._meter, self._base_bytes = meter, base_bytes
        for frame in self._frames:
            frame.figures = None

    def start(self) -> None:
        """Begin here: what happened before is nobody's."""
        self._meter.start()

    def account(self, changes: Changes | None) -> None:
        """Book what happened since the last look to the line that did it."""
        if not self.active:
            self._meter.start()
            return
        interval = self._meter.read(changes)
        frame = self._leaving or self._frames[-1]
        peak = interval.peak_bytes - self._base_bytes, interval.peak_exact
        if frame.figures is None and (interval.allocated_bytes or interval.freed_bytes):
            frame.figures = self._figures(frame.key)
        if frame.figures is not None:
            frame.figures.add(interval)
            frame.figures.reach(*peak)
        self._rise(peak)
        self._leaving = None

    def defer(self) -> Booking | None:
        """Whose the time since the last look is; None where it is nobody's, or has been booked."""
        if not self.active or self._meter.device.type != "cpu":
            self.account(None)
            return None
        leaving, self._leaving = self._leaving, None
        keys = [frame.key for frame in self._frames]
        key = leaving.key if leaving is not None else keys.pop()
        return Booking(key, tuple(keys), self._base_bytes)

    def settle(self, booking: Booking, interval: Interval) -> None:
        """Book what happened in such a time."""
        peak = interval.peak_bytes - booking.base_bytes, interval.peak_exact
        if interval.allocated_bytes or interval.freed_bytes or (*booking.key, CPU) in self.book:
            figures = self.book.setdefault((*booking.key, CPU), Figures())
            figures.add(interval)
            figures.reach(*peak)
        for caller in booking.callers:
            if (*caller, CPU) in self.book:
                self.book[*caller, CPU].reach(*peak)

    def enter(self, identity: int, key: Key) -> None:
        """A watched frame begins, or goes on after a ``yield`` or an ``await``."""
        self._frames.append(_Frame(identity, key))

    def line(self, identity: int, key: Key) -> None:
        """A watched frame begins with a line."""
        if not self._unwind_to(identity):  # it ran before anyone watched
            self.enter(identity, key)
        frame = self._frames[-1]
        frame.key, frame.figures = key, self._figures(key)
        frame.figures.hits += 1

    def leave(self, identity: int, torn_down: bool) -> None:
        """A watched frame ends; with ``torn_down`` what its variables held is freed next."""
        if self._unwind_to(identity):
            frame = self._pop()
            self._leaving = frame if torn_down else None

    def forget(self, n_begun: int) -> None:
        """Know of no frame: what is said of one was said before the profiler was enabled anew."""
        self._frames.clear()
        self._leaving = None
        self.n_begun = n_begun

    def clear(self) -> None:
        """Begin a new book."""
        self.book = {}
        for frame in self._frames:
            frame.figures = None

    def _figures(self, key: Key) -> Figures:
        place = (*key, self._meter.device)
        figures = self.book.get(place)
        if figures is None:
            figures = self.book[place] = Figures()
        return figures

    def _rise(self, peak: tuple[int, bool]) -> None:
        if self._frames:
            top = self._frames[-1]
            top.peak = peak if top.peak is None else _higher(top.peak, peak)

    def _pop(self) -> _Frame:
        """End the innermost frame; the line that called it was at its peak too."""
        frame = self._frames.pop()
        if frame.peak is not None and self._frames:
            self._rise(frame.peak)
            self._figures(self._frames[-1].key).reach(*frame.peak)
        return frame

    def _unwind_to(self, identity: int) -> bool:
        """Whether the frame is known; inner ones whose end nobody told are dropped."""
        if self._frames and self._frames[-1].identity == identity:
            return True
        if all(frame.identity != identity for frame in self._frames):
            return False
        while self._frames[-1].identity != identity:
            self._pop()
        return True


def _higher(first: tuple[int, bool], second: tuple[int, bool]) -> tuple[int, bool]:
    return max(first[0], second[0]), first[1] and second[1]
