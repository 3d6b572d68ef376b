"""What each profiler looks at, and what each thread keeps for the profilers that are enabled.

Invariant: a thread has at most one lane for a profiler, and keeps it while the profiler is enabled;
the profiler keeps the lanes' books for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType

import torch

from .._allocator import CpuMeter, DeviceAccount, DeviceMeter
from ._booking import Book, Lane, Meter, Place
from ._deferred import Marks

Codes = Mapping[int, CodeType]
"""Code objects by identity: their hashes take longer than a line's bookkeeping."""


class Watch:
    """What one profiler looks at: some codes, one device, and a book for each thread.

    Attributes:
        codes: the codes whose lines are booked, by identity.
        device: the device that is measured.
        n_begun: how often it was enabled.
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: Codes = {}
        self.device = device
        self.n_begun = 0
        self._lanes: list[Lane] = []
        self._marks: list[Marks] = []
        self._bases: dict[torch.device, int] = {}
        self._accounts: dict[torch.device, DeviceAccount] = {}

    def begin(self) -> None:
        """Count peaks from what is live now, and no frame as running."""
        self.n_begun += 1
        self._bases.clear()
        self._accounts.clear()
        self.base_bytes(self.device)

    def new_lane(self, marks: Marks) -> Lane:
        """The lane of a thread that has none, and that has these marks."""
        lane = Lane(self._meter_for(self.device), self.base_bytes(self.device), self.n_begun)
        lane.asked_for = self.device
        self._lanes.append(lane)
        self._marks.append(marks)
        return lane

    def aim(self, lane: Lane) -> None:
        """Let a lane measure what is to be measured now."""
        lane.aim(self._meter_for(self.device), self.base_bytes(self.device))
        lane.asked_for = self.device

    def base_bytes(self, device: torch.device) -> int:
        """What was live on a device when it was first looked at, which peaks leave out."""
        if device not in self._bases:
            self._bases[device] = self._meter_for(device).level_bytes
        return self._bases[device]

    def _meter_for(self, device: torch.device) -> Meter:
        """A meter for one lane; those of an accelerator share what its counters tell."""
        if device.type == "cpu":
            return CpuMeter()
        account = self._accounts.get(device)
        if account is None:
            account = self._accounts.setdefault(device, DeviceAccount(device))
        return DeviceMeter(account)

    def books(self) -> list[Book]:
        """The book of each thread."""
        return [lane.book() for lane in self._lanes]

    def unread(self) -> set[Place]:
        """The lines that a thread has more to tell of, once it reads its session."""
        return {visit.place for marks in self._marks for visit in marks.visits()}

    def clear(self) -> None:
        """Begin new books."""
        for lane in self._lanes:
            lane.clear()


class ThreadState:
    """What the hub knows of one thread.

    Attributes:
        in_session: whether a session of the allocator's events is open on it.
        reads_seldom: whether looks may wait in its marks; else its session is read at each, so that
            other threads can be told what it did.
        n_ticks: how often it ticked since the session was read.
        n_backwards: how many backward passes run on it, one inside the other.
        n_backwards_outside: how many of them ran when the session was opened.
        marks: the looks that are still to be taken.
        entered: the frame that began last, until something else is looked at.
        on_host: the lanes that measure host memory.
        on_devices: the other lanes.
    """

    __slots__ = (
        "_enabled", "_lanes", "entered", "in_session", "marks", "n_backwards",
        "n_backwards_outside", "n_ticks", "on_devices", "on_host", "reads_seldom",
    )  # fmt: skip

    def __init__(self) -> None:
        self.in_session = False
        self.reads_seldom = False
        self.n_ticks = 0
        self.n_backwards = self.n_backwards_outside = 0
        self.marks = Marks()
        self.entered = 0
        self.on_host: tuple[Lane, ...] = ()
        self.on_devices: tuple[Lane, ...] = ()
        self._enabled: tuple[Watch, ...] = ()
        self._lanes: dict[Watch, Lane] = {}

    @property
    def session_is_lent(self) -> bool:
        """Whether the engine has the session, and only marks can be set in it."""
        return self.in_session and self.n_backwards > self.n_backwards_outside

    def lane_of(self, watch: Watch) -> Lane:
        """The lane for a profiler that is enabled, measuring what the profiler now wants."""
        lane = self._lanes.get(watch)
        if lane is None:
            lane = self._lanes[watch] = watch.new_lane(self.marks)
            self._sort()
        elif lane.asked_for is not watch.device:
            watch.aim(lane)
            self._sort()
        return lane

    def _sort(self) -> None:
        lanes = self._lanes.values()
        self.on_host = tuple(lane for lane in lanes if lane.on_host)
        self.on_devices = tuple(lane for lane in lanes if not lane.on_host)

    def know(self, enabled: tuple[Watch, ...]) -> None:
        """Keep the lanes for the profilers that are enabled, and let go of the others."""
        if enabled is not self._enabled:
            self._enabled = enabled
            self._lanes = {w: lane for w, lane in self._lanes.items() if w in enabled}
            for watch, lane in self._lanes.items():
                if lane.n_begun != watch.n_begun:
                    lane.forget(watch.n_begun)
                    watch.aim(lane)
            self._sort()

    def is_active(self, enabled: tuple[Watch, ...]) -> bool:
        """Whether a watched frame is on the stack."""
        self.know(enabled)
        return any(lane.active for lane in self._lanes.values())
