"""Byte accounting: what is allocated, the most that was, and when an allocation must fail.

A pool holds numbers only, no tensor. In `MemoryPool`, the exact one, nothing is cached and nothing
can be fragmented; CUDA's is made from it. An allocation that raises changes nothing but the count
of failures.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tenure._cuda_blocks import up_to
from tenure._text import format_bytes_as_torch

from .._torch_backend import DEVICE_TYPE
from ._runtime import last_error

# The memory of a device of which the test chose no budget.
UNBOUNDED_BYTES = 1 << 40
FIGURES = ("current", "peak", "allocated", "freed")


@dataclass(slots=True)
class Counter:
    """One statistic with the `FIGURES` that `torch.cuda.memory_stats` gives for each."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        """Change the current value, and the total of what came or of what went."""
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount


@dataclass(slots=True, eq=False)
class Allocation:
    """What an allocation was given; its pool takes it back with `free`."""

    n_bytes: int
    requested_bytes: int = 0
    is_allocated: bool = False


def check_number(number: int | None) -> None:
    """Refuse what `fail_at` can't count to."""
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(f"fail_at={number!r}: allocations are counted from 1.")


class MemoryPool:
    """The accounting of one device: the budget bounds the active bytes, and nothing else is held.

    Args:
        budget_bytes: the memory that the device has; None for no bound.
        wait_host: called with a virtual time to stop the host until then.
        index: of the device.
        round_to_bytes: each allocation counts as a multiple of this.
    """

    names: tuple[str, ...] = (
        "allocation",
        "allocated_bytes",
        "requested_bytes",
        "active",
        "active_bytes",
    )
    """The statistics, of which each is counted in all `groups`."""
    groups: tuple[str, ...] = ("all",)
    has_cache = False

    def __init__(
        self,
        budget_bytes: int | None,
        wait_host: Callable[[float], None],
        index: int = 0,
        round_to_bytes: int = 1,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.index = index
        self.n_ooms = self.retry_count = self._n_syncs = 0
        self._round_to_bytes = round_to_bytes
        self._groups = {group: {name: Counter() for name in self.names} for group in self.groups}
        self.counters = self._groups["all"]
        if not self.has_cache:
            # Each active allocation is a segment.
            self.counters["segment"] = self.counters["active"]
            self.counters["reserved_bytes"] = self.counters["active_bytes"]
        self._allowed_bytes: int | None = None
        self._until_failure: int | None = None
        self._wait_host = wait_host
        # Blocks die wherever the interpreter drops them, in the middle of an allocation too.
        self._lock = threading.RLock()
        self._is_busy = False
        # What died, and until when a recorded stream uses it; and what waits for such streams.
        self._dead: list[tuple[Any, float | None]] = []
        self._waiting: list[tuple[Any, float]] = []

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live tensors."""
        return self.counters["allocated_bytes"].current

    @property
    def reserved_bytes(self) -> int:
        """What this pool holds of the device's memory."""
        return self.counters["reserved_bytes"].current

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the last `reset_peaks`."""
        return self.counters["allocated_bytes"].peak

    @property
    def total_bytes(self) -> int:
        """The memory of the device."""
        return UNBOUNDED_BYTES if self.budget_bytes is None else self.budget_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the device's memory; 0 where a lowered budget is exceeded."""
        return max(0, self.total_bytes - self.reserved_bytes)

    @property
    def failure_is_planted(self) -> bool:
        """Whether `fail_at` waits for its allocation."""
        return self._until_failure is not None

    def fail_at(self, number: int | None) -> None:
        """Make the `number`-th allocation from now fail, once; None takes that back."""
        check_number(number)
        self._until_failure = number

    def allocate(self, requested_bytes: int, host_s: float, stream_id: int = 0) -> Any:
        """Account one allocation, for use on a stream; None for an empty one, which is not counted.

        Raises:
            torch.OutOfMemoryError: there is no room for it, or `fail_at` chose it.
        """
        if requested_bytes == 0:
            return None
        with self._entered():
            self._count_down(requested_bytes)
            self.release_finished(host_s)
            taken = self._take(requested_bytes, stream_id)
            taken.requested_bytes, taken.is_allocated = requested_bytes, True
            self._count(taken, allocation=1, allocated_bytes=taken.n_bytes)
            self._count(taken, active=1, active_bytes=taken.n_bytes)
            self._count(taken, requested_bytes=requested_bytes)
            return taken

    def free(self, taken: Any, busy_until_s: float | None = None, host_s: float = 0.0) -> None:
        """Take an allocation back; with `busy_until_s` its bytes stay active until then."""
        if taken is None:
            return
        with self._lock:
            self._dead.append((taken, busy_until_s))
            # A tensor may die in the middle of an allocation: its block waits for the end of that.
            if not self._is_busy:
                self._take_back()
        if not self.has_cache:
            self.release_finished(host_s)

    def statistics(self, host_s: float) -> dict[str, int]:
        """Return the figures of `torch.cuda.memory_stats`."""
        if not self.has_cache:
            self.release_finished(host_s)
        segment = self.counters["segment"]
        stats = {
            f"{name}.{group}.{figure}": getattr(counter, figure)
            for group, counters in self._groups.items()
            for name, counter in counters.items()
            for figure in FIGURES
        }
        return stats | {
            "num_alloc_retries": self.retry_count,
            "num_ooms": self.n_ooms,
            "num_sync_all_streams": self._n_syncs,
            "num_device_alloc": segment.allocated,
            "num_device_free": segment.freed,
            "max_split_size": -1,
        }

    def empty_cache(self, host_s: float) -> None:
        """Give back to the device what is held and not used."""
        self.release_finished(host_s)

    def release_finished(self, host_s: float) -> None:
        """Let go of what waited for streams that are done at `host_s`."""
        with self._lock:
            done = [taken for taken, ready_s in self._waiting if ready_s <= host_s]
            self._waiting = [each for each in self._waiting if each[1] > host_s]
            for taken in done:
                self._release(taken)

    def refuse(self, requested_bytes: int, why: str = "") -> NoReturn:
        """Count a failed allocation and raise its error, with every size in the text."""
        self.n_ooms += 1
        raise torch.OutOfMemoryError(self._failure_text(requested_bytes) + why)

    def reset_peaks(self) -> None:
        """Start all peaks from the current values."""
        for counters in self._groups.values():
            for counter in counters.values():
                counter.peak = counter.current

    def reset_totals(self) -> None:
        """Start the running totals from zero."""
        self.n_ooms = self.retry_count = self._n_syncs = 0
        for counters in self._groups.values():
            for counter in counters.values():
                counter.allocated = counter.freed = 0

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False
                self._take_back()

    def _take_back(self) -> None:
        while self._dead:
            taken, busy_until_s = self._dead.pop(0)
            taken.is_allocated = False
            self._count(taken, allocation=-1, allocated_bytes=-taken.n_bytes)
            if busy_until_s is None:
                self._release(taken)
            else:
                self._waiting.append((taken, busy_until_s))

    def _take(self, requested_bytes: int, stream_id: int) -> Any:
        """Find room for an allocation, or refuse it."""
        n_bytes = up_to(requested_bytes, self._round_to_bytes)
        self._make_room(requested_bytes, n_bytes)
        return Allocation(n_bytes)

    def _reclaim(self) -> bool:
        """Give back what is not used, before an allocation is refused; whether there was any."""
        has_waiting = bool(self._waiting)
        self._n_syncs += has_waiting
        self._wait_for_recorded()
        return has_waiting

    def _failure_text(self, requested_bytes: int) -> str:
        """Return the text of the error of a refused allocation."""
        waiting_bytes = self.reserved_bytes - self.allocated_bytes
        budget = "no budget"
        if self.budget_bytes is not None:
            free = _sized(self.free_bytes)
            budget = f"a budget of {_sized(self.budget_bytes)} of which {free} is free"
        name = f"{DEVICE_TYPE}:{self.index}"
        return (
            f"{name} out of memory. Tried to allocate {_sized(requested_bytes)}. "
            f"{name} has {budget}; "
            f"{_sized(self.allocated_bytes)} is allocated by PyTorch, "
            f"and {_sized(waiting_bytes)} waits for other streams."
        )

    def _make_room(self, requested_bytes: int, wanted_bytes: int) -> None:
        # CUDA looks at its last error where it asks for memory of the device.
        last_error.check()
        if self._fits(wanted_bytes):
            return
        if self._reclaim():
            self.retry_count += 1
        if not self._fits(wanted_bytes):
            self.refuse(requested_bytes)

    def _fits(self, n_bytes: int) -> bool:
        held_bytes = self.reserved_bytes + n_bytes
        limits = self.budget_bytes, self._allowed_bytes
        return all(limit is None or held_bytes <= limit for limit in limits)

    def _release(self, taken: Any) -> None:
        """Take bytes back that no stream uses any more."""
        self._count(taken, active=-1, active_bytes=-taken.n_bytes)
        self._count(taken, requested_bytes=-taken.requested_bytes)

    def _wait_for_recorded(self) -> None:
        """Stop the host until all that waits for recorded streams can be released, and do it."""
        if self._waiting:
            until_s = max(ready_s for _, ready_s in self._waiting)
            self._wait_host(until_s)
            self.release_finished(until_s)

    def _count(self, taken: Any, **amounts: int) -> None:
        for group in self._groups_of(taken):
            for name, amount in amounts.items():
                self._groups[group][name].add(amount)

    def _groups_of(self, taken: Any) -> tuple[str, ...]:
        return ("all",)

    def _count_down(self, requested_bytes: int) -> None:
        if self._until_failure is None:
            return
        self._until_failure -= 1
        if self._until_failure == 0:
            self._until_failure = None
            self.refuse(requested_bytes, " This failure was planted with fail_at().")


def _sized(n_bytes: int) -> str:
    short = format_bytes_as_torch(n_bytes)
    exact = f"{n_bytes} bytes"
    return short if short == exact else f"{short} ({exact})"
