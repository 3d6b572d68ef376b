"""Late kernels: what a stream was given runs only when something waits, and in the worst order.

Each block has its bytes twice. The *expected* ones, which the operators work on as they are
launched, are what a program without a missing wait finds; they tell of shapes and keep indices
valid. The *true* ones are written when the work runs, out of true ones, and only these reach the
host. Work runs when the host waits for it, or for what comes after it. Of two pieces that touch the
same bytes with no wait between, the one that was launched later runs first.

The memory of a freed block goes to the next one of its size and stream, as a caching allocator
gives it.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tenure._torch.storages import key_of

from .._torch_backend import below_everything
from ._host_memory import POISON, bytes_in, extent_bytes
from ._races import RaceDetector, Span, VectorClock

# A real queue has an end too: a host that runs further ahead waits.
_MOST_PENDING = 1000


@dataclass(frozen=True, slots=True)
class Touch:
    """Bytes `[low, high)` that a piece of work reads or writes, of the memory named `memory`."""

    memory: Hashable
    low: int
    high: int
    is_write: bool

    def conflicts(self, other: "Touch") -> bool:
        """Whether the order of the two matters."""
        overlap = self.low < other.high and other.low < self.high
        return self.memory == other.memory and overlap and (self.is_write or other.is_write)


def touch(true: torch.Tensor, *, is_write: bool) -> Touch:
    """The touch of a host tensor over true bytes."""
    low = int(true.storage_offset()) * true.element_size()
    memory = key_of(true.untyped_storage())
    return Touch(memory, low, low + extent_bytes(true), is_write)


def touch_of_host(span: Span, *, is_write: bool) -> Touch:
    """The touch of pinned host memory."""
    return Touch(id(span.history), span.low, span.high, is_write)


@dataclass(frozen=True, slots=True)
class Later:
    """A piece of work: what it does to true bytes, and which."""

    name: str
    run: Callable[[], object]
    touches: tuple[Touch, ...]
    poison: Callable[[], None] = lambda: None


@dataclass(eq=False, slots=True)
class _Launched:
    work: Later
    number: int
    stream_id: int
    tick: int
    seen: VectorClock
    has_begun: bool = False

    def is_before(self, seen: VectorClock) -> bool:
        return seen.get(self.stream_id, 0) >= self.tick


@dataclass(slots=True)
class _Twin:
    expected: torch.UntypedStorage
    true: torch.UntypedStorage


@dataclass
class LateWork:
    """The work that has not run yet, and the true bytes of all blocks."""

    detector: RaceDetector
    _queues: dict[int, deque[_Launched]] = field(default_factory=lambda: defaultdict(deque))
    _users: dict[Hashable, dict[int, _Launched]] = field(default_factory=lambda: defaultdict(dict))
    _running: list[_Launched] = field(default_factory=list)
    _twins: dict[int, _Twin] = field(default_factory=dict)
    _idle: dict[tuple[int, int], list[torch.UntypedStorage]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _n_launched: int = 0
    _n_pending: int = 0
    _lock: Any = field(default_factory=threading.RLock)

    def add(self, work: Later, stream: Any) -> None:
        """Put the newest launch of a stream off."""
        number, seen = stream.number, dict(stream.seen)
        with self._lock:
            self._n_launched += 1
            launched = _Launched(work, self._n_launched, number, seen[number], seen)
            self._queues[number].append(launched)
            for each in work.touches:
                self._users[each.memory][launched.number] = launched
            self._n_pending += 1
            while self._n_pending > _MOST_PENDING:
                self._run(min((q[0] for q in self._queues.values() if q), key=lambda w: w.number))

    def settle(self, seen: VectorClock) -> None:
        """Run all that comes before `seen`, and before it what has no wait for it."""
        with self._lock:
            for stream_id, tick in seen.items():
                self._run_up_to(stream_id, tick)

    def settle_all(self) -> None:
        """Run all that was launched."""
        with self._lock:
            for queue in list(self._queues.values()):
                while queue:
                    self._run(queue[0])

    def settle_before(self, of: Touch, seen: VectorClock) -> None:
        """Run what comes before `seen` and must come before a touch that is made now."""
        with self._lock:
            for other in list(self._users.get(of.memory, {}).values()):
                if other.has_begun or not other.is_before(seen):
                    continue
                if any(each.conflicts(of) for each in other.work.touches):
                    self._run(other)

    def true_storage(self, expected: torch.UntypedStorage) -> torch.UntypedStorage:
        """The true bytes of a block, which start as expected if the block is an old one."""
        twin = self._twins.get(key_of(expected))
        if twin is None:
            twin = _Twin(expected, bytes_in(expected).clone().untyped_storage())
            self._twins[key_of(expected)] = twin
        return twin.true

    def adopt(self, expected: torch.UntypedStorage, stream_id: int) -> None:
        """Give a new block true bytes: those of the last one of its size and stream, or poison."""
        n_bytes = expected.nbytes()
        with self._lock:
            idle = self._idle[stream_id, n_bytes]
            true = idle.pop() if idle else _poisoned(n_bytes)
            self._twins[key_of(expected)] = _Twin(expected, true)

    def release(self, expected: torch.UntypedStorage, stream_id: int, *, is_recorded: bool) -> None:
        """Let go of a block; one that streams were recorded on is not used again."""
        with self._lock:
            twin = self._twins.pop(key_of(expected), None)
            if twin is not None and not is_recorded:
                self._idle[stream_id, expected.nbytes()].append(twin.true)

    def show(self, tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Expect of tensors, given as expected and true ones, what they truly are."""
        for expected, true in tensors:
            expected.copy_(true)

    def expect_truth(self) -> None:
        """Run all and expect of all blocks what is true."""
        self.settle_all()
        for twin in self._twins.values():
            bytes_in(twin.expected).copy_(bytes_in(twin.true))

    def make_true(self) -> None:
        """Make of all blocks true what is expected: what was launched since has run."""
        for twin in self._twins.values():
            bytes_in(twin.true).copy_(bytes_in(twin.expected))

    def _run_up_to(self, stream_id: int, tick: int) -> None:
        queue = self._queues.get(stream_id)
        while queue and queue[0].tick <= tick and not queue[0].has_begun:
            self._run(queue[0])

    def _run(self, launched: _Launched) -> None:
        launched.has_begun = True
        self._running.append(launched)
        for stream_id, tick in launched.seen.items():
            is_own = stream_id == launched.stream_id
            self._run_up_to(stream_id, tick - 1 if is_own else tick)
        for other in self._intruders(launched):
            if not other.has_begun:
                self._run(other)
        self._running.pop()
        self._queues[launched.stream_id].remove(launched)
        for each in launched.work.touches:
            self._users[each.memory].pop(launched.number, None)
        self._n_pending -= 1
        self._do(launched.work)

    def _intruders(self, launched: _Launched) -> list[_Launched]:
        """What was launched later, touches the same bytes and has no wait: it may come first."""
        found = {}
        for mine in launched.work.touches:
            for other in self._users.get(mine.memory, {}).values():
                if other.number <= launched.number or other.has_begun:
                    continue
                if any(running.is_before(other.seen) for running in self._running):
                    continue
                if any(
                    mine.conflicts(its) for its in other.work.touches if its.memory == mine.memory
                ):
                    found[other.number] = other
        return list(found.values())

    def _do(self, work: Later) -> None:
        try:
            with below_everything():
                work.run()
        except Exception as error:
            # As an index does that was read from bytes which were not there yet.
            work.poison()
            self.detector.faults.append(f"late kernel: {work.name} failed when it ran: {error}")


def _poisoned(n_bytes: int) -> torch.UntypedStorage:
    return torch.full((n_bytes,), POISON, dtype=torch.uint8, device="cpu").untyped_storage()
