"""What each line of one profiler did, on all threads.

Invariants: every interval goes to exactly one line, the one that the innermost watched frame is at,
so the lines of all watched functions together add up to what was allocated and freed in them. Only
the peak of a line covers what it called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType

import torch

from tenure._stream import Stream
from tenure._torch import cpu_allocator as allocator

from ._device_meter import DeviceMeter, Usage

Key = tuple[int, int]
"""A line: the identity of its code, whose hash takes long, and its number."""
Codes = Mapping[int, CodeType]
"""Code objects by identity."""


# Threads share these: nothing is called between the reading of a number and its writing.
@dataclass(slots=True)
class Figures:
    """What one line did on one device, over all its hits; see `LineRecord`.

    Attributes:
        peak_bytes: None as long as nothing was booked.
    """

    hits: int = 0
    allocated_bytes: int = 0
    freed_bytes: int = 0
    peak_bytes: int | None = None
    exact: bool = True
    peak_exact: bool = True
    statistics: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Account:
    """A device, as a profiler measures it.

    Attributes:
        meter: what reads the counters of an accelerator; None for the host, whose events are seen.
        base_bytes: what was in use when the profiler was enabled, which peaks leave out.
        lines: the figures of each line on this device.
    """

    meter: DeviceMeter | None
    base_bytes: int
    lines: dict[Key, Figures]


class Visit:
    """A line that a frame is at, once: the claim to what happens until the next one.

    Invariant: it has reached at least the peak of what it called.
    """

    __slots__ = ("account", "caller", "figures", "identity", "peak_bytes")

    def __init__(self, identity: int, account: Account, key: Key, caller: Visit | None) -> None:
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
        visit: Visit | None = self
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
        self.visits: list[Visit] = []
        self.leaving: Visit | None = None

    @property
    def is_active(self) -> bool:
        """Whether what happens now is a watched line's doing."""
        return bool(self.visits) or self.leaving is not None

    def claim(self, goes_on: bool) -> Visit | None:
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

    def line(self, identity: int, account: Account, key: Key, hits: int) -> None:
        """A frame is about to run a line, or (with no hit) goes on in the midst of one."""
        # one that nobody knows has just begun, or ran before anyone watched
        if self._unwind_to(identity):
            self.visits.pop()
        visit = Visit(identity, account, key, self.visits[-1] if self.visits else None)
        visit.figures.hits += hits
        self.visits.append(visit)

    def leave(self, identity: int, torn_down: bool) -> None:
        """A frame ends; with ``torn_down`` what its variables held is freed next."""
        if self._unwind_to(identity):
            visit = self.visits.pop()
            self.leaving = visit if torn_down else None

    def _unwind_to(self, identity: int) -> bool:
        """Whether the frame is known; inner ones whose end nobody told are dropped."""
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

    account: Account

    def __init__(self, device: torch.device) -> None:
        self.codes: Codes = {}
        self.device = device
        self.lines: dict[torch.device, dict[Key, Figures]] = {}
        self.frames: dict[int, Frames] = {}
        self.is_metered = False
        self._accounts: dict[torch.device, Account] = {}

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
            account = Account(meter, base_bytes, self.lines.setdefault(device, {}))
            self._accounts[device] = account
        elif account.meter is not None:
            account.meter.start()
        self.device, self.account = device, account
        self.is_metered |= account.meter is not None

    def count(self, visit: Visit | None, stream: Stream) -> None:
        """Book what the counters of an accelerator have grown by; not of the host."""
        account = self.account if visit is None else visit.account
        meter, changes = account.meter, None
        if meter is None:
            return
        if meter.is_cuda:
            stream.is_told_of_devices = True
            changes = stream.device_changes()
        if visit is not None:
            visit.add(meter.read(changes, visit.figures.statistics))
        # autograd's engine may run on a thread of its own what a line of another one has called
        elif not any(frames.visits for frames in list(self.frames.values())):
            meter.start()

    def clear(self) -> None:
        """Forget what the lines did; one that is running counts from when it is begun again."""
        for lines in self.lines.values():
            lines.clear()
