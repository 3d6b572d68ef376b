"""The allocations of host memory on one thread, as c10 reports them, cut by the marks of consumers.

Each thread has one stream, and torch one session of its events; any number of consumers set marks
among them, and each is told what happened between its own. A session is read after some dozens of
marks, so it never holds many events.

Invariants: a session is open only while a consumer follows and no other profiler has the thread;
all consumers are told the same events, in order, each once; what a measuring mode makes torch
allocate is told to none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, ClassVar, NamedTuple, Protocol

from tenure._heap import collector_paused
from tenure._torch import allocations
from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import Changes, as_event
from tenure._torch.autograd import is_running_node, running_task

from ._process import Process

# Reading takes its time for each session and for each event: fewest both at about a hundred.
_MARKS_PER_READING = 64
process = Process(lambda: this_stream().make_way())
"""What all streams share."""


class Consumer(Protocol):
    """Who follows a stream, and puts its own claims on what happens between its marks."""

    def take(self, claim: Any, changes: list[int], level_bytes: int) -> None:
        """Get what was allocated (positive) and freed up to a mark, and what was in use there."""

    def miss(self, claim: Any, was_bytes: int, level_bytes: int) -> None:
        """Get what was in use at the mark before and at this one: no events were seen."""

    def look(self) -> None:
        """Set a mark now: the session is about to be read for another consumer."""


# Its number (None if it could not be set), its consumer, the claim, and the level.
_Mark = tuple[int | None, Consumer | None, Any, int]


class _Hidden(NamedTuple):
    """Events that the program would not have, which a mark says.

    Attributes:
        sizes: what is allocated next, and freed soon.
        sum_bytes: the last that was allocated, and is freed soon; 0 for none.
    """

    sizes: Sequence[int] = ()
    sum_bytes: int = 0


class AllocationStream:
    """The events of one thread.

    Attributes:
        is_open: whether a session of ours is open.
        n_missed: how many marks had no session.
        n_busy: above 0 while a mark is set, or the session must not be read.
        modes: the dispatch modes that measure this thread, the innermost last.
        is_told_of_devices: whether events of CUDA devices are kept for ``device_changes``.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.n_missed = 0
        self.modes: list[Any] = []
        self.is_told_of_devices = False
        self._thread = get_ident()
        self._task = -1
        self._marks: list[_Mark] = []
        self._n_marks = 0
        # Of each consumer the level at its last mark, and events after it that were read.
        self._levels: dict[Consumer, int] = {}
        self._followers: list[Consumer] = []
        self._left: dict[Consumer, list[int]] = {}
        self._device_changes: list[int] | None = []
        self.n_busy = 0
        self._is_turning = False
        self._coming: list[int] = []
        self._going: list[int] = []
        self._set_mark: Any = None
        self._live = allocator.live_counter()

    # --- consumers

    def follow(self, consumer: Consumer) -> None:
        """Tell a consumer what happens from here on."""
        self._live = allocator.live_counter()
        self._levels[consumer] = self._live.value
        self._followers.append(consumer)
        if self.is_open:
            self.mark(consumer, None)
        else:
            self.resume()

    def leave(self, consumer: Consumer) -> None:
        """Tell a consumer the rest, up to its last mark, and nothing more."""
        if consumer not in self._followers:
            return
        if self.is_open and self._is_lent():
            # A session that is lent would end in the copy alone: the next who follows ends it.
            self._give_up(consumer)
        elif self._followers != [consumer]:
            self.read(asked_by=consumer)
        elif self.is_open:
            self._end_told()
        self._followers.remove(consumer)
        del self._levels[consumer]
        self._left.pop(consumer, None)

    def mark(self, consumer: Consumer, claim: Any) -> None:
        """Give what happened since the consumer's last mark to a claim; None gives it to nobody."""
        level_bytes = self._live.value
        if not self.is_open:
            self._mark_closed(consumer, claim, level_bytes)
            return
        self._put(consumer, claim, level_bytes)
        if self._n_marks >= _MARKS_PER_READING:
            self.read(asked_by=consumer)

    def read(self, asked_by: Consumer | None = None) -> None:
        """Tell all consumers what happened, as far as the session can be read."""
        if not self.is_open or self.n_busy or self._is_lent() or not allocations.is_profiling():
            return
        with self._busy():
            for consumer in tuple(self._followers):
                if consumer is not asked_by:
                    consumer.look()
            marks, changes = self._turned(allocations.turn)
            if changes is None:
                self._close()
            self._tell(marks, changes)

    def device_changes(self) -> list[int] | None:
        """Read and return the events of CUDA devices since this was last asked; None if unseen."""
        if not self.is_open or self._is_lent():
            self._device_changes = None
            return None
        self.read()
        found, self._device_changes = self._device_changes, []
        return found

    # --- told by modes that measure

    def hide_numbers(self, sizes: Sequence[int]) -> None:
        """Hide tensors of numbers that the operation which is about to run makes a second time.

        In ``x * 2`` torch makes a tensor of the number, shows a mode the number, and makes another
        tensor when the mode calls the operation.

        Args:
            sizes: their bytes.
        """
        if self.is_open:
            self._put(None, _Hidden(sizes), 0)

    def hold(self, change: int) -> None:
        """Let no reading come in (1) until what is to be hidden is told, and that (-1)."""
        if get_ident() == self._thread:
            self.n_busy += change

    def hide_sum(self, n_bytes: int) -> None:
        """Hide a sum that autograd makes in place without the mode, and the operand that it frees.

        Source: https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp
        """
        if self.is_open:
            self._put(None, _Hidden((), n_bytes), 0)

    # --- the session

    def make_way(self) -> None:
        """End the session: a profiler of the program is about to begin on this thread."""
        if self.is_open:
            for consumer in tuple(self._followers):
                consumer.look()
            self._end_told()

    def abandon(self) -> None:
        """End the session untold: at the end of the interpreter, and in a forked child."""
        if self.is_open:
            self._end()
        # others may go on, such as lines of a forked child
        self._marks, self._n_marks = [], 0
        self._left.clear()
        level_bytes: int = self._live.value
        self._levels = dict.fromkeys(self._levels, level_bytes)

    def resume(self) -> None:
        """Open a session again, if another profiler has ended it, or had the thread.

        Not to be called between the beginning of a profiler and the `make_way` before it.
        """
        is_profiling = allocations.is_profiling()
        if self.is_open and not is_profiling:
            with self._busy():
                marks, self._marks, self._n_marks = self._marks, [], 0
                self._close()
                self._tell(marks, None)
        if self.is_open or is_profiling:
            return
        allocations.begin()
        self.is_open = True
        self._set_mark = allocations.marker()
        self._coming, self._going = [], []
        # While a backward pass calls Python, torch has given the thread a copy of the state that it
        # had when backward() was called, and puts the original back afterwards. A session is part
        # of that state: one that was begun outside of the pass can only be marked in it.
        self._task = running_task()
        process.count_session(+1)
        level_bytes: int = self._live.value
        self._levels = dict.fromkeys(self._levels, level_bytes)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Open a block that reads or reports; our own calls are reported too, and must not mark."""
        self.n_busy += 1
        try:
            yield
        finally:
            self.n_busy -= 1

    def _end_told(self) -> None:
        with self._busy():
            self._tell(*self._end())

    def _end(self) -> tuple[list[_Mark], Changes | None]:
        # an interrupt in here leaves it open, for `abandon` to end it
        told = self._turned(allocations.end)
        self._close()
        return told

    def _turned(self, turn: Callable[[], Changes | None]) -> tuple[list[_Mark], Changes | None]:
        """Read the session: its marks, and its events."""
        self._is_turning = True
        try:
            # thousands of objects are made for that, which are gone at once
            with collector_paused():
                changes = turn()
            # from here on the numbers are those of a new session
            marks, self._marks, self._n_marks = self._marks, [], 0
        finally:
            self._is_turning = False
        return marks, changes

    def _close(self) -> None:
        self.is_open = False
        process.count_session(-1)

    def _is_lent(self) -> bool:
        """Return whether a backward pass has a copy of the session, which only takes marks."""
        return running_task() != self._task

    def _put(self, consumer: Consumer | None, claim: Any, level_bytes: int) -> None:
        # while the session is read, nobody knows in which of two a mark would stand
        if self._is_turning or get_ident() != self._thread:
            self._marks.append((None, consumer, claim, level_bytes))
            return
        # An interrupt may come in between. A claim without a mark is told with the next; a mark
        # without a claim would be taken for that of the next.
        # calls of ours are reported, too, and must set no other mark meanwhile
        self.n_busy += 1
        try:
            number = self._n_marks
            self._marks.append((number, consumer, claim, level_bytes))
            self._n_marks = number + 1
            self._set_mark(number)
        finally:
            self.n_busy -= 1

    def _mark_closed(self, consumer: Consumer, claim: Any, level_bytes: int) -> None:
        was_bytes = self._levels[consumer]
        # A thread of autograd's engine has a copy of the session of who called backward(): what is
        # made here is told there.
        if process.n_sessions and is_running_node():
            was_bytes = level_bytes
        # before it is told: a call of ours may mark once more meanwhile
        self._levels[consumer] = level_bytes
        if claim is not None:
            consumer.miss(claim, was_bytes, level_bytes)
        self.n_missed += 1

    def _tell(self, marks: list[_Mark], changes: Changes | None) -> None:
        """Tell each consumer what happened up to its marks."""
        events = [] if changes is None else changes.cpu
        begins: dict[Consumer, int] = {}
        seen: list[int] = []
        start, is_known = 0, allocator.is_known()
        for number, consumer, claim, level_bytes in marks:
            # A mark is missing if it was set in a state that the session is not in: what came
            # before it is told with the next mark, and only the level is known here.
            end = None if number is None else _place_of(events, as_event(number), start)
            if end is not None:
                part = events[start:end]
                if consumer is None or self._coming or self._going:
                    part = self._shown(part, claim)
                seen += part
                start = end + 1
            if consumer is None:
                continue
            was_bytes = self._levels[consumer]
            if end is None:
                self._levels[consumer] = level_bytes
                if claim is not None:
                    consumer.miss(claim, was_bytes if changes is None else level_bytes, level_bytes)
                continue
            part = self._left.pop(consumer, []) + seen[begins.get(consumer, 0) :]
            begins[consumer] = len(seen)
            # The end is what other threads left it at; else this thread's own sum. What is hidden
            # and not freed yet is none of the program's.
            level_bytes = level_bytes + sum(self._going) if is_known else was_bytes + sum(part)
            self._levels[consumer] = level_bytes
            if claim is not None:
                consumer.take(claim, part, level_bytes)
        seen += self._shown(events[start:], None)
        for consumer in self._followers:
            if rest := seen[begins.get(consumer, 0) :]:
                self._left[consumer] = self._left.get(consumer, []) + rest
        if changes is None:
            self._left.clear()
            self._device_changes = None
        elif self.is_told_of_devices and self._device_changes is not None:
            self._device_changes += changes.cuda

    def _give_up(self, consumer: Consumer) -> None:
        """Tell a consumer the levels at its marks, as the session can't be read any more."""
        marks, self._marks = self._marks, []
        for mark in marks:
            _, owner, claim, level_bytes = mark
            if owner is not consumer:
                self._marks.append(mark)
            elif claim is not None:
                self.n_missed += 1
                consumer.miss(claim, self._levels[consumer], level_bytes)
                self._levels[consumer] = level_bytes

    def _shown(self, part: list[int], claim: Any) -> list[int]:
        """Return the events before a mark without those that the program would not have."""
        if part:
            n = len(self._coming)
            # an operation of Python wraps no number again
            if part[:n] == self._coming:
                part = part[n:]
                self._going += [-size for size in self._coming]
            self._coming = []
        for size in [*self._going]:
            if size in part:
                part.remove(size)
                self._going.remove(size)
        if type(claim) is _Hidden:
            self._coming = [*claim.sizes]
            if claim.sum_bytes in part:
                del part[len(part) - 1 - part[::-1].index(claim.sum_bytes)]
                self._going.append(-claim.sum_bytes)
        return part


class ThisThread(threading.local):
    """An object of each thread, ``found``, which a class makes when it is first asked for.

    Not in ``__init__``: monitoring reports that call, too, which asks for the object.
    """

    kind: ClassVar[type]

    def __getattr__(self, name: str) -> Any:
        if name != "found":
            raise AttributeError(name)
        # to make it is reported as well, by which the thread may have one already
        made = self.kind()
        return self.__dict__.setdefault("found", made)


class _StreamOfThread(ThisThread):
    kind = AllocationStream


_this_thread = _StreamOfThread()


def this_stream() -> AllocationStream:
    """Return the stream of this thread."""
    found: AllocationStream = _this_thread.found
    return found


def _place_of(events: list[int], mark: int, start: int) -> int | None:
    try:
        return events.index(mark, start)
    except ValueError:
        return None
