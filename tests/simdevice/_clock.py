"""The virtual clock: when the host and each engine of the device are next free.

Time moves only when work is launched or waited for, so the same program always takes the same time.
Engines work side by side; within one engine, and within one stream, work runs in launch order.
"""

from collections import Counter
from typing import Literal, Protocol

from ._rates import Rates

Engine = Literal["h2d", "d2h", "compute"]


class Queue(Protocol):
    """Anything with a time at which its last work ends: a stream."""

    ready_s: float


class Clock:
    """Virtual seconds of the host and of the engines since the device was started."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.host_s = 0.0
        self._engine_ready_s: dict[Engine, float] = {"h2d": 0.0, "d2h": 0.0, "compute": 0.0}
        self.busy_s: Counter[str] = Counter()
        self.copied_bytes: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.host_waits = 0

    def launch_kernel(self, queue: Queue, flops: int, n_bytes: int) -> None:
        """Put one kernel on `queue`."""
        self.host_s += self.rates.host_launch_s
        self._occupy(queue, "compute", self.rates.kernel_s(flops, n_bytes))

    def launch_copy(self, queue: Queue, engine: Engine, n_bytes: int, *, pinned: bool) -> None:
        """Put one copy over the link on `queue`."""
        self.host_s += self.rates.host_copy_s
        self.copied_bytes[engine] += n_bytes
        duration_s = self.rates.copy_s(n_bytes, to_device=engine == "h2d", pinned=pinned)
        self._occupy(queue, engine, duration_s)

    def wait(self, until_s: float) -> None:
        """Stop the host until `until_s`, if that is still ahead."""
        self.host_waits += 1
        self.host_s = max(self.host_s, until_s)

    def poll(self, until_s: float) -> bool:
        """Whether the host has reached `until_s`; asking takes it a little further."""
        self.host_s += self.rates.host_poll_s
        return until_s <= self.host_s

    def finished_s(self) -> float:
        """When all work launched so far is done."""
        return max(self.host_s, *self._engine_ready_s.values())

    def _occupy(self, queue: Queue, engine: Engine, duration_s: float) -> None:
        start_s = max(self.host_s, queue.ready_s, self._engine_ready_s[engine])
        queue.ready_s = start_s + duration_s
        self._engine_ready_s[engine] = queue.ready_s
        self.busy_s[engine] += duration_s
        self.launches[engine] += 1
