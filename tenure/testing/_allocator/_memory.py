"""Byte accounting: what is allocated, the most that was, and when an allocation must fail.

A pool holds numbers only, no tensor. What every allocator does stands in `MemoryPool`; `ExactPool`
is the plain one, in which nothing is cached and nothing can be fragmented. An allocation that
raises changes nothing but the count of failures.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

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

    def grow(self, amount: int) -> None:
        """Add to the current value and to the total."""
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def shrink(self, amount: int) -> None:
        """Take from the current value."""
        self.current -= amount
        self.freed += amount


@dataclass(slots=True, eq=False)
class Allocation:
    """What an allocation was given; its pool takes it back with `free`."""

    requested_bytes: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What the program let go and a recorded stream uses until `ready_s`."""

    taken: Any
    ready_s: float


def check_number(number: int | None) -> None:
    """Refuse what `fail_at` can't count to."""
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(f"fail_at={number!r}: allocations are counted from 1.")


class MemoryPool(ABC):
    """The accounting of one simulated device.

    Args:
        budget_bytes: the memory that the device has; None for no bound.
        wait_host: called with a virtual time to stop the host until then.
        index: of the device.
    """

    def __init__(
        self, budget_bytes: int | None, wait_host: Callable[[float], None], index: int = 0
    ) -> None:
        self.budget_bytes = budget_bytes
        self.counters: dict[str, Counter] = {}
        self.n_ooms = 0
        self.retry_count = 0
        self._until_failure: int | None = None
        self._waiting: list[_Waiting] = []
        self._wait_host = wait_host
        self.index = index
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
    @abstractmethod
    def reserved_bytes(self) -> int:
        """What this pool holds of the device's memory."""

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the last `reset_peaks`."""
        return self.counters["allocated_bytes"].peak

    @property
    def n_allocations(self) -> int:
        """How many allocations succeeded so far."""
        return self.counters["allocation"].allocated

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

    @abstractmethod
    def allocate(self, requested_bytes: int, host_s: float, stream_id: int = 0) -> Any:
        """Account one allocation, for use on a stream; None for an empty one, which is not counted.

        Raises:
            torch.OutOfMemoryError: there is no room for it, or `fail_at` chose it.
        """

    @abstractmethod
    def free(self, taken: Any, busy_until_s: float | None = None, host_s: float = 0.0) -> None:
        """Take an allocation back; with `busy_until_s` its bytes stay active until then."""

    @abstractmethod
    def statistics(self, host_s: float) -> dict[str, int]:
        """What `torch.cuda.memory_stats` tells."""

    @abstractmethod
    def empty_cache(self, host_s: float) -> None:
        """Give back to the device what is held and not used."""

    def release_finished(self, host_s: float) -> None:
        """Let go of what waited for streams that are done at `host_s`."""
        with self._lock:
            done = [each for each in self._waiting if each.ready_s <= host_s]
            self._waiting = [each for each in self._waiting if each.ready_s > host_s]
            for each in done:
                self._release(each.taken)

    def refuse(self, requested_bytes: int, why: str = "") -> NoReturn:
        """Count a failed allocation and raise its error, with every size in the text."""
        self.n_ooms += 1
        raise torch.OutOfMemoryError(self._failure_text(requested_bytes) + why)

    def reset_peaks(self) -> None:
        """Start all peaks from the current values."""
        for counter in self.counters.values():
            counter.peak = counter.current

    def reset_totals(self) -> None:
        """Start the running totals from zero."""
        self.n_ooms = self.retry_count = 0
        for counter in self.counters.values():
            counter.allocated = counter.freed = 0

    @abstractmethod
    def _release(self, taken: Any) -> None:
        """Take bytes back that no stream uses any more."""

    def _let_go(self, taken: Any, busy_until_s: float | None) -> None:
        """Release what the program no longer has, now or when recorded streams are done with it."""
        if busy_until_s is None:
            self._release(taken)
        else:
            self._waiting.append(_Waiting(taken, busy_until_s))

    def _wait_for_recorded(self) -> None:
        """Stop the host until all that waits for recorded streams can be released, and do it."""
        if self._waiting:
            until_s = max(each.ready_s for each in self._waiting)
            self._wait_host(until_s)
            self.release_finished(until_s)

    @abstractmethod
    def _failure_text(self, requested_bytes: int) -> str:
        """What the error of a refused allocation says."""

    def _count_down(self, requested_bytes: int) -> None:
        if self._until_failure is None:
            return
        self._until_failure -= 1
        if self._until_failure == 0:
            self._until_failure = None
            self.refuse(requested_bytes, " This failure was planted with fail_at().")


class ExactPool(MemoryPool):
    """Each allocation for itself: the budget bounds `active_bytes`, and nothing else is held.

    Args:
        budget_bytes: the most that may be active; None for no bound.
        round_to_bytes: each allocation counts as a multiple of this.
        wait_host: called with a virtual time to stop the host until then.
        index: of the device.
    """

    def __init__(
        self,
        budget_bytes: int | None,
        round_to_bytes: int,
        wait_host: Callable[[float], None],
        index: int = 0,
    ) -> None:
        super().__init__(budget_bytes, wait_host, index)
        if round_to_bytes < 1:
            raise ValueError(f"round_to_bytes={round_to_bytes}: must be 1 or more.")
        self.round_to_bytes = round_to_bytes
        names = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes")
        self.counters = {name: Counter() for name in names}

    @property
    def reserved_bytes(self) -> int:
        """What is active: there is no cache."""
        return self.active_bytes

    def rounded(self, n_bytes: int) -> int:
        """What an allocation of `n_bytes` counts as."""
        return -(-n_bytes // self.round_to_bytes) * self.round_to_bytes

    def allocate(
        self, requested_bytes: int, host_s: float, stream_id: int = 0
    ) -> Allocation | None:
        """Count one allocation; all streams are alike."""
        if requested_bytes == 0:
            return None
        with self._lock:
            # CUDA looks at its last error where it takes a segment; here every allocation is one.
            last_error.check()
            self._count_down(requested_bytes)
            self.release_finished(host_s)
            self._make_room(requested_bytes)
            return self._grow(requested_bytes)

    def free(
        self, taken: Allocation | None, busy_until_s: float | None = None, host_s: float = 0.0
    ) -> None:
        """Uncount an allocation, and at once all whose streams are done at `host_s`."""
        if taken is None:
            return
        with self._lock:
            self.counters["allocation"].shrink(1)
            self.counters["allocated_bytes"].shrink(taken.n_bytes)
            self.counters["requested_bytes"].shrink(taken.requested_bytes)
            self._let_go(taken, busy_until_s)
            self.release_finished(host_s)

    def empty_cache(self, host_s: float) -> None:
        """Nothing is cached; only blocks whose recorded streams are done are let go."""
        self.release_finished(host_s)

    def statistics(self, host_s: float) -> dict[str, int]:
        """The figures of CUDA, of which small and large pools are not told apart."""
        self.release_finished(host_s)
        active = self.counters["active"]
        reserved = {"reserved_bytes": self.counters["active_bytes"], "segment": active}
        stats = {
            f"{name}.all.{figure}": getattr(counter, figure)
            for name, counter in (self.counters | reserved).items()
            for figure in FIGURES
        }
        return stats | {
            "num_ooms": self.n_ooms,
            "num_alloc_retries": self.retry_count,
            "num_sync_all_streams": self.retry_count,
            "num_device_alloc": active.allocated,
            "num_device_free": active.freed,
        }

    def _make_room(self, requested_bytes: int) -> None:
        needed_bytes = self.rounded(requested_bytes)
        if self._fits(needed_bytes):
            return
        if self._waiting:
            # As the caching allocator does before it gives up.
            self.retry_count += 1
            self._wait_for_recorded()
        if not self._fits(needed_bytes):
            self.refuse(requested_bytes)

    def _fits(self, n_bytes: int) -> bool:
        return self.budget_bytes is None or self.active_bytes + n_bytes <= self.budget_bytes

    def _grow(self, requested_bytes: int) -> Allocation:
        taken = Allocation(requested_bytes, self.rounded(requested_bytes))
        self.counters["allocation"].grow(1)
        self.counters["active"].grow(1)
        self.counters["allocated_bytes"].grow(taken.n_bytes)
        self.counters["active_bytes"].grow(taken.n_bytes)
        self.counters["requested_bytes"].grow(requested_bytes)
        return taken

    def _release(self, taken: Allocation) -> None:
        self.counters["active"].shrink(1)
        self.counters["active_bytes"].shrink(taken.n_bytes)

    def _failure_text(self, requested_bytes: int) -> str:
        waiting_bytes = self.active_bytes - self.allocated_bytes
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


def _sized(n_bytes: int) -> str:
    short = format_bytes_as_torch(n_bytes)
    exact = f"{n_bytes} bytes"
    return short if short == exact else f"{short} ({exact})"
