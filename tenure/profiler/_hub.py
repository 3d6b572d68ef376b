"""Where the events of a trace meet those of the allocator, for all profilers of a process.

Invariant: a session is open on a thread while, and only while, a watched frame is on its stack and
no other profiler has the thread; what the allocator did between two events of the trace is booked
before the second is acted upon. A session is read at each watched line and every few hundred calls
or turns of a loop in between, so it never holds many events.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Protocol

import torch

from . import _torch_allocations as allocations
from . import _torch_cpu_allocator as allocator
from ._existing import enter_existing
from ._lanes import Book, Key, Lane
from ._meters import meter_for
from ._torch_profilers import announce

_TICKS_PER_TURN = 256


class Engine(Protocol):
    """What reports the lines of some code objects, as they run, to a hub."""

    def start(self) -> None:
        """Begin to report."""

    def watch(self, codes: frozenset[CodeType]) -> None:
        """Report these codes and no others; unwatched ones only tick."""

    def stop(self) -> None:
        """Report nothing more."""


class Watch:
    """What one profiler looks at: some codes, one device, and a book for each thread.

    Attributes:
        codes: the codes whose lines are booked.
        device: the device that is measured.
        n_entries: how often a watched frame was seen to begin or go on.
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: frozenset[CodeType] = frozenset()
        self.device = device
        self.n_entries = 0
        self._lanes: list[Lane] = []
        self._bases: dict[torch.device, int] = {}

    def begin(self) -> None:
        """Count peaks from what is live now."""
        self._bases.clear()
        self.base_bytes(self.device)

    def new_lane(self) -> Lane:
        """The lane of a thread that has none."""
        lane = Lane(meter_for(self.device), self.base_bytes(self.device))
        self._lanes.append(lane)
        return lane

    def base_bytes(self, device: torch.device) -> int:
        """What was live on a device when it was first looked at, which peaks leave out."""
        if device not in self._bases:
            self._bases[device] = meter_for(device).level_bytes
        return self._bases[device]

    def books(self) -> list[Book]:
        """The book of each thread."""
        return [lane.book for lane in self._lanes]

    def clear(self) -> None:
        """Begin new books."""
        for lane in self._lanes:
            lane.book = {}
        self.n_entries = 0


class Hub:
    """The one place that engines report to, and that profilers are opened in."""

    def __init__(self, engine: Callable[[Hub], Engine]) -> None:
        self._engine = engine(self)
        self._lock = threading.RLock()
        self._watches: tuple[Watch, ...] = ()
        self._threads = _Threads()
        self._stop_announcing: Callable[[], None] | None = None

    # --- what profilers call

    def is_open(self, watch: Watch) -> bool:
        """Whether a profiler is enabled."""
        return watch in self._watches

    def open(self, watch: Watch) -> None:
        """Begin to report to a profiler; on some engines only on threads that start from now on."""
        with self._lock:
            first = not self._watches
            if first:
                self._begin()
            self._threads.lanes_of((watch,))
            watch.begin()
            for lane in self._threads.lanes_of((watch,)):
                lane.aim(meter_for(watch.device), watch.base_bytes(watch.device))
            self._watches = (*self._watches, watch)
            self.refresh()
            if first:
                self._engine.start()

    def close(self, watch: Watch) -> None:
        """Report no more to a profiler; what happened up to now is booked."""
        with self._lock:
            self._account()
            self._watches = tuple(other for other in self._watches if other is not watch)
            for lane in self._threads.lanes_of((watch,)):
                lane.forget()
            self._end_if_idle()
            self.refresh()
            if not self._watches:
                self._end()

    def refresh(self) -> None:
        """Let the engine know of changed codes."""
        with self._lock:
            codes = frozenset[CodeType]().union(*(watch.codes for watch in self._watches))
            self._engine.watch(codes)

    def look(self) -> None:
        """Book what this thread did up to now."""
        self._account()

    def close_all(self) -> None:
        """Close every profiler, so that the interpreter ends without a session."""
        for watch in self._watches:
            self.close(watch)

    # --- what the engine calls

    def enter(self, identity: int, code: CodeType, line: int) -> None:
        """A frame of a watched code begins, or goes on."""
        self._account()
        if not self._threads.in_session and not allocations.is_profiling():
            self._begin_session()
        for watch in self._watches:
            if code in watch.codes:
                watch.n_entries += 1
                self._threads.lane_of(watch).enter(identity, (code, line))

    def line(self, identity: int, code: CodeType, line: int) -> None:
        """A watched frame is about to run a line."""
        self._account()
        if not self._threads.in_session and not allocations.is_profiling():
            self._begin_session()
        key: Key = code, line
        for watch in self._watches:
            if code in watch.codes:
                self._threads.lane_of(watch).line(identity, key)

    def leave(self, identity: int, code: CodeType, torn_down: bool) -> bool:
        """A watched frame ends or is suspended.

        Returns:
            Whether ``torn_down_now`` is wanted: the frame's variables are freed before the frame
            below goes on, and nothing else is.
        """
        self._account()
        for watch in self._watches:
            if code in watch.codes:
                self._threads.lane_of(watch).leave(identity, torn_down)
        self._end_if_idle()
        return torn_down and self._threads.in_session

    def torn_down_now(self) -> None:
        """The frame that was left is gone, with its variables."""
        self._account()
        self._end_if_idle()

    def tick(self) -> None:
        """Something unwatched was called, or went once more around a loop."""
        threads = self._threads
        if threads.in_session:
            threads.n_ticks += 1
            if threads.n_ticks >= _TICKS_PER_TURN:
                self._account()

    @property
    def in_session(self) -> bool:
        """Whether ticks are wanted on this thread."""
        return self._threads.in_session

    # --- sessions

    def _account(self) -> None:
        threads = self._threads
        threads.n_ticks = 0
        changes = None
        if threads.in_session:
            changes = allocations.turn()
            threads.in_session = changes is not None
        for lane in threads.lanes_of(self._watches):
            lane.account(changes)

    def _begin_session(self) -> None:
        """What was done since the last look is nobody's, or has been booked as unseen."""
        allocations.begin()
        self._threads.in_session = True
        for watch in self._watches:
            self._threads.lane_of(watch).start()

    def _end_if_idle(self) -> None:
        threads = self._threads
        if threads.in_session and not any(lane.active for lane in threads.lanes_of(self._watches)):
            threads.in_session = False
            allocations.end()

    def _make_way(self) -> None:
        """A profiler of the program is about to begin on this thread."""
        if self._threads.in_session:
            self._account()
            self._threads.in_session = False
            allocations.end()

    # --- the first and the last

    def _begin(self) -> None:
        enter_existing()
        allocator.keep_sizes(True)
        self._stop_announcing = announce(self._make_way)
        atexit.register(self.close_all)

    def _end(self) -> None:
        atexit.unregister(self.close_all)
        self._engine.stop()
        if self._stop_announcing is not None:
            self._stop_announcing()
        allocator.keep_sizes(False)


class _Threads(threading.local):
    """What the hub knows of each thread."""

    def __init__(self) -> None:
        self.in_session = False
        self.n_ticks = 0
        self._lanes: dict[Watch, Lane] = {}

    def lane_of(self, watch: Watch) -> Lane:
        """The lane of this thread for a profiler, measuring what the profiler now wants."""
        lane = self._lanes.get(watch)
        if lane is None:
            lane = self._lanes[watch] = watch.new_lane()
        elif lane.device != watch.device:
            lane.aim(meter_for(watch.device), watch.base_bytes(watch.device))
        return lane

    def lanes_of(self, watches: Iterable[Watch]) -> list[Lane]:
        """The lanes that this thread has for some profilers."""
        return [self._lanes[watch] for watch in watches if watch in self._lanes]
