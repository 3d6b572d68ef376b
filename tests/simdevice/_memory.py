"""Byte accounting: what is allocated, the most that was, and when an allocation must fail.

The pool holds numbers only, no tensor. `allocated_bytes` is exactly the sum of the live blocks;
`active_bytes` adds the blocks that are let go but still recorded on a stream, and the budget
bounds `active_bytes`. An allocation that raises changes nothing but the count of failures.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from ._torch_backend import DEVICE_TYPE
from ._units import format_bytes


@dataclass(slots=True)
class Counter:
    """One statistic with the four figures that `torch.cuda.memory_stats` gives for each."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def grow(self, amount: int) -> None:
        """Add to the current value and to the total."""
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def shrink(self, amount: int) -> None:
        """Take from the current value."""
        self.current -= amount
        self.freed += amount


@dataclass(frozen=True, slots=True)
class _Pending:
    """Bytes let go by the program that a recorded stream uses until `ready_s`."""

    n_bytes: int
    ready_s: float


_COUNTERS = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes")


class MemoryPool:
    """The accounting of one simulated device.

    Args:
        budget_bytes: the most that may be active; None for no bound.
        round_to_bytes: each allocation counts as a multiple of this (512 on CUDA).
        wait_host: called with a virtual time to stop the host until then.
    """

    def __init__(
        self,
        budget_bytes: int | None,
        round_to_bytes: int,
        wait_host: Callable[[float], None],
    ) -> None:
        if round_to_bytes < 1:
            raise ValueError(f"round_to_bytes={round_to_bytes}: must be 1 or more.")
        self.budget_bytes = budget_bytes
        self.round_to_bytes = round_to_bytes
        self.counters = {name: Counter() for name in _COUNTERS}
        self.oom_count = 0
        self.retry_count = 0
        self._pending: list[_Pending] = []
        self._until_failure: int | None = None
        self._wait_host = wait_host
        # Blocks die wherever the interpreter drops them, in the middle of an allocation too.
        self._lock = threading.RLock()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live tensors."""
        return self.counters["allocated_bytes"].current

    @property
    def active_bytes(self) -> int:
        """Allocated bytes and those that wait for a recorded stream."""
        return self.counters["active_bytes"].current

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the last `reset_peaks`."""
        return self.counters["allocated_bytes"].peak

    @property
    def allocation_count(self) -> int:
        """How many allocations succeeded so far."""
        return self.counters["allocation"].allocated

    @property
    def failure_is_planted(self) -> bool:
        """Whether `fail_at` waits for its allocation."""
        return self._until_failure is not None

    def fail_at(self, number: int | None) -> None:
        """Make the `number`-th allocation from now fail, once; None takes that back."""
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"fail_at={number!r}: allocations are counted from 1.")
        self._until_failure = number

    def rounded(self, n_bytes: int) -> int:
        """What an allocation of `n_bytes` counts as."""
        return -(-n_bytes // self.round_to_bytes) * self.round_to_bytes

    def allocate(self, requested_bytes: int, host_s: float) -> None:
        """Count one allocation. An empty one reaches no allocator and is not counted.

        Raises:
            torch.OutOfMemoryError: it would exceed the budget, or `fail_at` chose it.
        """
        if requested_bytes == 0:
            return
        with self._lock:
            self._count_down(requested_bytes)
            self.release_finished(host_s)
            self._make_room(requested_bytes)
            self._grow(requested_bytes)

    def free(self, requested_bytes: int, busy_until_s: float | None = None) -> None:
        """Uncount an allocation; with `busy_until_s` its bytes stay active until then."""
        if requested_bytes == 0:
            return
        with self._lock:
            n_bytes = self.rounded(requested_bytes)
            self.counters["allocation"].shrink(1)
            self.counters["allocated_bytes"].shrink(n_bytes)
            self.counters["requested_bytes"].shrink(requested_bytes)
            if busy_until_s is None:
                self._deactivate(n_bytes)
            else:
                self._pending.append(_Pending(n_bytes, busy_until_s))

    def refuse(self, requested_bytes: int, why: str = "") -> NoReturn:
        """Count a failed allocation and raise its error, with every size in the text."""
        self.oom_count += 1
        raise torch.OutOfMemoryError(self._failure_text(requested_bytes) + why)

    def release_finished(self, host_s: float) -> None:
        """Let go of what waited for streams that are done at `host_s`."""
        with self._lock:
            done = [block for block in self._pending if block.ready_s <= host_s]
            self._pending = [block for block in self._pending if block.ready_s > host_s]
            for block in done:
                self._deactivate(block.n_bytes)

    def reset_peaks(self) -> None:
        """Start all peaks from the current values."""
        for counter in self.counters.values():
            counter.peak = counter.current

    def reset_totals(self) -> None:
        """Start the running totals from zero."""
        self.oom_count = self.retry_count = 0
        for counter in self.counters.values():
            counter.allocated = counter.freed = 0

    def free_bytes(self) -> int | None:
        """What is left of the budget, 0 where more is active than it allows; None without one."""
        return None if self.budget_bytes is None else max(0, self.budget_bytes - self.active_bytes)

    def _count_down(self, requested_bytes: int) -> None:
        if self._until_failure is None:
            return
        self._until_failure -= 1
        if self._until_failure == 0:
            self._until_failure = None
            self.refuse(requested_bytes, " This failure was planted with fail_at().")

    def _make_room(self, requested_bytes: int) -> None:
        needed_bytes = self.rounded(requested_bytes)
        if self._fits(needed_bytes):
            return
        if self._pending:
            # As the caching allocator does before it gives up: wait for the recorded streams.
            self.retry_count += 1
            until_s = max(block.ready_s for block in self._pending)
            self._wait_host(until_s)
            self.release_finished(until_s)
        if not self._fits(needed_bytes):
            self.refuse(requested_bytes)

    def _fits(self, n_bytes: int) -> bool:
        return self.budget_bytes is None or self.active_bytes + n_bytes <= self.budget_bytes

    def _grow(self, requested_bytes: int) -> None:
        n_bytes = self.rounded(requested_bytes)
        self.counters["allocation"].grow(1)
        self.counters["active"].grow(1)
        self.counters["allocated_bytes"].grow(n_bytes)
        self.counters["active_bytes"].grow(n_bytes)
        self.counters["requested_bytes"].grow(requested_bytes)

    def _deactivate(self, n_bytes: int) -> None:
        self.counters["active"].shrink(1)
        self.counters["active_bytes"].shrink(n_bytes)

    def _failure_text(self, requested_bytes: int) -> str:
        waiting_bytes = self.active_bytes - self.allocated_bytes
        return (
            f"{DEVICE_TYPE}:0 out of memory. Tried to allocate {_sized(requested_bytes)}. "
            f"{DEVICE_TYPE}:0 has a budget of {_sized(self.budget_bytes)} "
            f"of which {_sized(self.free_bytes())} is free; "
            f"{_sized(self.allocated_bytes)} is allocated by PyTorch, "
            f"and {_sized(waiting_bytes)} waits for other streams."
        )


def _sized(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "no bound"
    short = format_bytes(n_bytes)
    exact = f"{n_bytes} bytes"
    return short if short == exact else f"{short} ({exact})"
