"""Keep the figures of each line of one profiler, on all threads.

Invariants: every interval goes to exactly one line, the one that the innermost watched frame is at,
so the lines of all watched functions together add up to what was allocated and freed in them. Only
the peak of a line covers what it called. The counters of an accelerator are the process's: each
byte that they count is booked by one thread at the most, the first that reads them afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import CodeType
from typing import NamedTuple

import torch

from tenure._stream import Allocated, AllocationStream, allocated_on
from tenure._torch import cpu_allocator as allocator

Key = tuple[int, int]
"""A line: the identity of its code, whose hash takes long, and its number."""
Codes = Mapping[int, CodeType]
"""Code objects by identity."""


# A named tuple and no frozen dataclass, which takes three times as long to make.
class Usage(NamedTuple):
    """The bytes that were allocated and freed in an interval.

    Attributes:
        allocated_bytes: bytes that were allocated.
        freed_bytes: bytes that were freed.
        peak_bytes: the most that was live.
        exact: whether the allocator's events were seen, or counted.
        peak_exact: whether the peak is the peak, and not the larger of the two ends.
    """

    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    exact: bool = True
    peak_exact: bool = True


def unseen_usage(was_bytes: int, level_bytes: int) -> Usage:
    """Return the usage of an interval of which only the levels at its two ends are known."""
    net = level_bytes - was_bytes
    return Usage(max(0, net), max(0, -net), max(was_bytes, level_bytes), False, False)


# Threads share these: nothing is called between the reading of a number and its writing.
@dataclass(slots=True)
class Figures:
    """The figures of one line on one device, over all its hits; see `LineRecord`.

    Attributes:
        peak_bytes: None as long as nothing was booked.
    """

    hits: int = 0
    allocated_bytes: int = 0
    freed_bytes: int = 0
    peak_bytes: int | None = None
    exact: bool = True
    peak_exact: bool = True


@dataclass(slots=True)
class LineAccount:
    """A device, as a profiler measures it.

    Attributes:
        meter: what reads the counters of an accelerator; None for the host, whose events are seen.
        base_bytes: what was in use when the profiler was enabled, which peaks leave out.
        lines: the figures of each line on this device.
    """

    meter: DeviceMeter | None
    base_bytes: int
    lines: dict[Key, Figures]


class LineVisit:
    """A line that a frame is at, once: the claim to what happens until the next one.

    Invariant: it has reached at least the peak of what it called.
    """

    __slots__ = ("account", "caller", "figures", "identity", "peak_bytes")

    def __init__(
        self, identity: int, account: LineAccount, key: Key, caller: LineVisit | None
    ) -> None:
        self.identity = identity
        self.account = account
        # of another device nothing is added up
        self.caller = None if caller is None or caller.account is not account else caller
        figures = account.lines.get(key)
        if figures is None:
            figures = account.lines.setdefault(key, Figures())
        self.figures = figures
        self.peak_bytes: int | None = None

    def add(self, usage: Usage) -> None:
        """Book what happened."""
        figures = self.figures
        figures.allocated_bytes += usage.allocated_bytes
        figures.freed_bytes += usage.freed_bytes
        figures.exact &= usage.exact
        self.reach(usage.peak_bytes, usage.peak_exact)

    def reach(self, level_bytes: int, exact: bool) -> None:
        """Have reached a level, as those who called have; one as high before has told them."""
        peak_bytes = level_bytes - self.account.base_bytes
        # a loop and no recursion: a profiled function may be at any depth of its own
        visit: LineVisit | None = self
        while visit is not None:
            known, figures = visit.peak_bytes, visit.figures
            if known is None or known < peak_bytes:
                visit.peak_bytes = peak_bytes
                if figures.peak_bytes is None or figures.peak_bytes < peak_bytes:
                    figures.peak_bytes = peak_bytes
            elif exact:
                return
            figures.peak_exact &= exact
            visit = visit.caller


class Frames:
    """The watched frames of one thread, for one profiler.

    Attributes:
        visits: the line that each frame is at, the innermost last.
        leaving: that of the frame that is being torn down: what its variables held is freed there.
    """

    def __init__(self) -> None:
        self.visits: list[LineVisit] = []
        self.leaving: LineVisit | None = None

    @property
    def is_active(self) -> bool:
        """Whether what happens now is a watched line's doing."""
        return bool(self.visits) or self.leaving is not None

    def claim(self, goes_on: bool) -> LineVisit | None:
        """Return whose the time since the last mark is; None if it is nobody's.

        Args:
            goes_on: whether it is a mark in the midst of what a line does.
        """
        leaving = self.leaving
        if leaving is None:
            return self.visits[-1] if self.visits else None
        if not goes_on:
            self.leaving = None
        return leaving

    def line(self, identity: int, account: LineAccount, key: Key, hits: int) -> None:
        """Begin a line of a frame, or (with no hit) resume one."""
        # one that nobody knows has just begun, or ran before anyone watched
        if self._unwind_to(identity):
            self.visits.pop()
        visit = LineVisit(identity, account, key, self.visits[-1] if self.visits else None)
        visit.figures.hits += hits
        self.visits.append(visit)

    def leave(self, identity: int, torn_down: bool) -> None:
        """End a frame; with ``torn_down`` its variables are freed next."""
        if self._unwind_to(identity):
            visit = self.visits.pop()
            self.leaving = visit if torn_down else None

    def _unwind_to(self, identity: int) -> bool:
        """Return whether the frame is known; inner ones whose end nobody told are dropped."""
        visits = self.visits
        if visits and visits[-1].identity == identity:
            return True
        if all(visit.identity != identity for visit in visits):
            return False
        while visits[-1].identity != identity:
            visits.pop()
        return True


class Book:
    """The measurement of one profiler.

    Attributes:
        codes: the codes whose lines are measured.
        device: the device that is measured.
        account: the one of that device, once the profiler was enabled.
        lines: the figures of the lines by device.
        frames: those of each thread, by its number.
        is_metered: whether an accelerator was measured since the profiler was enabled.
    """

    account: LineAccount

    def __init__(self, device: torch.device) -> None:
        self.codes: Codes = {}
        self.device = device
        self.lines: dict[torch.device, dict[Key, Figures]] = {}
        self.frames: dict[int, Frames] = {}
        self.is_metered = False
        self._accounts: dict[torch.device, LineAccount] = {}

    def begin(self) -> None:
        """Count peaks from what is live now; frames that are known are from before."""
        self.frames.clear()
        self._accounts.clear()
        self.is_metered = False
        self.measure(self.device)

    def measure(self, device: torch.device) -> None:
        """Measure a device, on each thread from its next line on."""
        account = self._accounts.get(device)
        if account is None:
            meter = None if device.type == "cpu" else DeviceMeter(device)
            base_bytes = allocator.live_bytes() if meter is None else meter.live_bytes
            account = LineAccount(meter, base_bytes, self.lines.setdefault(device, {}))
            self._accounts[device] = account
        elif account.meter is not None:
            account.meter.start()
        self.device, self.account = device, account
        self.is_metered |= account.meter is not None

    def count(self, visit: LineVisit | None, stream: AllocationStream) -> None:
        """Book what the counters of an accelerator have grown by; not of the host."""
        account = self.account if visit is None else visit.account
        meter, changes = account.meter, None
        if meter is None:
            return
        if meter.is_cuda:
            stream.is_told_of_devices = True
            changes = stream.device_changes()
        if visit is not None:
            visit.add(meter.read(changes))
        # autograd's engine may run on a thread of its own what a line of another one has called
        elif not any(frames.visits for frames in list(self.frames.values())):
            meter.start()

    def clear(self) -> None:
        """Forget what the lines did; one that is running counts from when it is begun again."""
        for lines in self.lines.values():
            lines.clear()


# --- the counters of accelerators


class DeviceMeter:
    """The counters of one device.

    Attributes:
        is_cuda: whether the allocator's events of a thread are told, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device = device
        # reentrant: torch's function that reads them is Python, whose calls the profiler sees
        self._lock = threading.RLock()
        self._counted = Allocated()
        self.start()

    @property
    def live_bytes(self) -> int:
        """The bytes in use at the last reading."""
        return self._counted.current

    def start(self) -> tuple[Allocated, Allocated]:
        """Begin an interval; return the counters at the last one, and now."""
        # read and replaced under one lock: in between, another thread would book the same bytes
        with self._lock:
            before, self._counted = self._counted, allocated_on(self._device)
            return before, self._counted

    def read(self, changes: list[int] | None) -> Usage:
        """Return what has come since the last interval began, and begin the next.

        Args:
            changes: the events of this thread on all CUDA devices; None where they were not seen.
        """
        return _usage(*self.start(), changes or [])


def _usage(before: Allocated, after: Allocated, changes: list[int]) -> Usage:
    start, end = before.current, after.current
    # if a counter was reset meanwhile, what it has counted since
    pairs = (before.allocated, after.allocated), (before.freed, after.freed)
    allocated, freed = (b - a if b >= a else b for a, b in pairs)
    if allocated - freed != end - start:
        # reset meanwhile, or never counted, as with cudaMallocAsync
        usage = unseen_usage(start, end)
    else:
        # only up, or only down: one of the ends is the peak
        usage = Usage(allocated, freed, max(start, end), True, not (allocated and freed))
        if changes and sum(changes) == end - start and sum(map(abs, changes)) == allocated + freed:
            usage = usage._replace(peak_bytes=start + max(accumulate(changes)), peak_exact=True)
    # no counter is reset for us, so only a new peak is told by the counter of the peak
    if after.peak > before.peak:
        usage = usage._replace(peak_bytes=after.peak, peak_exact=True)
    return usage
