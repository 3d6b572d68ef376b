"""The virtual clock: when the host and each engine of the device are next free.

Time moves only when work is launched or waited for, so the same program always takes the same time.
Engines work side by side; within one engine, and within one stream, work runs in launch order.
"""

from collections import Counter, defaultdict
from typing import Literal, Protocol

from ._rates import Rates

Engine = Literal["h2d", "d2h", "compute"]


class Queue(Protocol):
    """Anything of a device with a time at which its last work ends: a stream."""

    ready_s: float
    device_index: int


class Clock:
    """Virtual seconds of the host and of each device's engines since the machine was started."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.host_s = 0.0
        self._engine_ready_s: dict[tuple[int, Engine], float] = defaultdict(float)
        self.busy_s: dict[tuple[int, Engine], float] = defaultdict(float)
        self.copied_bytes: Counter[tuple[int, Engine]] = Counter()
        self.launches: Counter[tuple[int, Engine]] = Counter()
        self.host_waits = 0

    def launch_kernel(self, queue: Queue, flops: int, n_bytes: int) -> None:
        """Put one kernel on `queue`."""
        self.launch_timed(queue, self.rates.kernel_s(flops, n_bytes))

    def launch_timed(self, queue: Queue, duration_s: float) -> None:
        """Put one kernel on `queue` that takes so long."""
        self.host_s += self.rates.host_launch_s
        self._occupy(queue, "compute", duration_s)

    def launch_copy(self, queue: Queue, engine: Engine, n_bytes: int, *, pinned: bool) -> None:
        """Put one copy over the link on `queue`."""
        self.host_s += self.rates.host_copy_s
        self.copied_bytes[queue.device_index, engine] += n_bytes
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
        return max([self.host_s, *self._engine_ready_s.values()])

    def _occupy(self, queue: Queue, engine: Engine, duration_s: float) -> None:
        worker = queue.device_index, engine
        start_s = max(self.host_s, queue.ready_s, self._engine_ready_s[worker])
        queue.ready_s = start_s + duration_s
        self._engine_ready_s[worker] = queue.ready_s
        self.busy_s[worker] += duration_s
        self.launches[worker] += 1
