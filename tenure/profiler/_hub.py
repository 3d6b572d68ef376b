"""Where the events of a trace meet those of the allocator, for all profilers of a process.

Invariant: a session is open on a thread while, and only while, a watched frame is on its stack and
no other profiler has the thread; what the allocator did between two events of the trace is booked
before the second is acted upon. A session is read at each watched line and every few hundred calls
or turns of a loop in between, so it never holds many events.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Mapping
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

Codes = Mapping[int, CodeType]
"""Code objects by identity."""


class Engine(Protocol):
    """What reports the lines of some code objects, as they run, to a hub."""

    def start(self) -> None:
        """Begin to report."""

    def watch(self, codes: Codes) -> None:
        """Report these codes and no others; unwatched ones only tick."""

    def stop(self) -> None:
        """Report nothing more, but tick on threads in a session until they know that it is over."""


class Watch:
    """What one profiler looks at: some codes, one device, and a book for each thread.

    Attributes:
        codes: the codes whose lines are booked, by identity.
        device: the device that is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: dict[int, CodeType] = {}
        self.device = device
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
            lane.clear()


class Hub:
    """The one place that engines report to, and that profilers are opened in.

    Attributes:
        n_sessions: on how many threads a session is open.
    """

    def __init__(self, engine: Callable[[Hub], Engine]) -> None:
        self.n_sessions = 0
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
            self._engine.watch({i: c for watch in self._watches for i, c in watch.codes.items()})

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
        self._begin_session()
        key: Key = id(code), line
        for watch in self._watches:
            if key[0] in watch.codes:
                self._threads.lane_of(watch).enter(identity, key)

    def line(self, identity: int, code: CodeType, line: int) -> None:
        """A watched frame is about to run a line."""
        self._account()
        self._begin_session()
        key: Key = id(code), line
        for watch in self._watches:
            if key[0] in watch.codes:
                self._threads.lane_of(watch).line(identity, key)

    def leave(self, identity: int, code: CodeType, torn_down: bool) -> bool:
        """A watched frame ends or is suspended.

        Returns:
            Whether ``torn_down_now`` is wanted: the frame's variables are freed before the frame
            below goes on, and nothing else is.
        """
        self._account()
        for watch in self._watches:
            if id(code) in watch.codes:
                self._threads.lane_of(watch).leave(identity, torn_down)
        self._end_if_idle()
        return torn_down and self._is_active()

    def torn_down_now(self) -> None:
        """The frame that was left is gone, with its variables."""
        self._account()
        self._end_if_idle()

    def tick(self) -> bool:
        """Something unwatched was called, or went once more around a loop.

        Returns:
            Whether ticks are wanted on this thread now.
        """
        threads = self._threads
        if not threads.in_session:
            return False
        threads.n_ticks += 1
        if threads.n_ticks >= _TICKS_PER_TURN or not self._watches:
            self._account()
            self._end_if_idle()  # as when the last profiler was closed by another thread
        return threads.in_session

    # --- sessions

    def _account(self) -> None:
        threads = self._threads
        threads.n_ticks = 0
        changes = None
        if threads.in_session:
            changes = allocations.turn()
            if changes is None:
                self._count_session(-1)
        for lane in threads.lanes_of(self._watches):
            lane.account(changes)

    def _begin_session(self) -> None:
        """Open one, unless it is open or the thread is another profiler's."""
        threads = self._threads
        if threads.in_session or allocations.is_profiling():
            return
        allocations.begin()
        self._count_session(+1)
        for watch in self._watches:
            threads.lane_of(watch).start()

    def _end_if_idle(self) -> None:
        if self._threads.in_session and not self._is_active():
            self._count_session(-1)
            allocations.end()

    def _count_session(self, change: int) -> None:
        with self._lock:
            self._threads.in_session = change > 0
            self.n_sessions += change

    def _is_active(self) -> bool:
        return any(lane.active for lane in self._threads.lanes_of(self._watches))

    def _make_way(self) -> None:
        """A profiler of the program is about to begin on this thread."""
        if self._threads.in_session:
            self._account()
            self._count_session(-1)
            allocations.end()

    # --- the first and the last

    def _begin(self) -> None:
        allocator.keep_sizes(True)
        enter_existing()
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
