"""The virtual clock: when the host and each engine of the device are next free, by their rates.

Time moves only when work is launched or waited for, so the same program always takes the same time.
Engines work side by side; within one engine, and within one stream, work runs in launch order. No
speed depends on the machine that runs the tests, and every field of `Rates` says its unit.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from threading import get_ident
from typing import Literal, Protocol

from tenure._torch.autograd import is_running_node

Engine = Literal["h2d", "d2h", "compute"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds and latencies; the defaults stand for a PCIe 4 x16 link and an A100-like device.

    Attributes:
        h2d_bytes_per_s: host to device, from pinned memory.
        d2h_bytes_per_s: device to host, into pinned memory.
        pageable_bytes_per_s: either way, when the host side is not pinned.
        copy_latency_s: added to each copy over the link.
        flops_per_s: for operations whose arithmetic torch's flop counter knows.
        memory_bytes_per_s: for all others, by the bytes that they read and write.
        kernel_launch_s: the least time that a kernel occupies the device.
        host_launch_s: what the host spends to launch a kernel.
        host_copy_s: what the host spends to start a copy.
        host_poll_s: what the host spends to ask whether work is done.

    Example:
        >>> from tenure.testing import Rates
        >>> Rates(h2d_bytes_per_s=1e9, copy_latency_s=0.0).copy_s(1000, to_device=True, pinned=True)
        1e-06
    """

    h2d_bytes_per_s: float = 24e9
    d2h_bytes_per_s: float = 24e9
    pageable_bytes_per_s: float = 8e9
    copy_latency_s: float = 8e-6
    flops_per_s: float = 150e12
    memory_bytes_per_s: float = 1.3e12
    kernel_launch_s: float = 4e-6
    host_launch_s: float = 8e-6
    host_copy_s: float = 6e-6
    host_poll_s: float = 1e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_speed = getattr(self, field.name), field.name.endswith("_per_s")
            if not (value > 0 if is_speed else value >= 0):
                least = "more than 0" if is_speed else "0 or more"
                raise ValueError(f"Rates({field.name}={value}): must be {least}.")

    def kernel_s(self, flops: int, n_bytes: int) -> float:
        """Time of one kernel: the slowest of its arithmetic, its memory traffic and its launch."""
        arithmetic_s = flops / self.flops_per_s
        return max(self.kernel_launch_s, arithmetic_s, n_bytes / self.memory_bytes_per_s)

    def copy_s(self, n_bytes: int, *, to_device: bool, pinned: bool) -> float:
        """Time of one copy over the link."""
        pinned_bytes_per_s = self.h2d_bytes_per_s if to_device else self.d2h_bytes_per_s
        bytes_per_s = pinned_bytes_per_s if pinned else self.pageable_bytes_per_s
        return self.copy_latency_s + n_bytes / bytes_per_s


class Queue(Protocol):
    """Anything of a device with a time at which its last work ends: a stream."""

    ready_s: float
    device_index: int


class Clock:
    """Virtual seconds of the host and of each device's engines since the machine was started."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._host_s = 0.0
        # The threads that have called a backward pass, and the times of autograd's own beside them.
        self._callers: list[int] = []
        self._beside_s: dict[int, float] = {}
        self._engine_ready_s: dict[tuple[int, Engine], float] = defaultdict(float)
        self.busy_s: dict[tuple[int, Engine], float] = defaultdict(float)
        self.copied_bytes: Counter[tuple[int, Engine]] = Counter()
        self.launches: Counter[tuple[int, Engine]] = Counter()
        self.host_waits = 0

    @property
    def host_s(self) -> float:
        """When this thread is next free: autograd's own keep a time beside that of all others."""
        beside = self._thread_beside()
        return self._host_s if beside is None else self._beside_s[beside]

    @host_s.setter
    def host_s(self, at_s: float) -> None:
        beside = self._thread_beside()
        if beside is None:
            self._host_s = at_s
        else:
            self._beside_s[beside] = at_s

    def begin_backward(self) -> None:
        """Note that this thread calls a backward pass, whose nodes may run on other threads.

        While it waits for a copy there, they go on launching, as real threads do. One of them
        begins at the time of the first pass that is called.
        """
        if not self._callers:
            begin_s = self._host_s
            self._beside_s = defaultdict(lambda: begin_s)
        self._callers.append(get_ident())

    def end_backward(self) -> None:
        """End it: the caller goes on when all of them are done."""
        self._callers.remove(get_ident())
        if not self._callers:
            self._host_s = max([self._host_s, *self._beside_s.values()])
            self._beside_s = {}

    def _thread_beside(self) -> int | None:
        if not self._callers or not is_running_node():
            return None
        thread = get_ident()
        return None if thread in self._callers else thread

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
        """Return whether the host has reached `until_s`; asking takes it a little further."""
        self.host_s += self.rates.host_poll_s
        return until_s <= self.host_s

    def finished_s(self) -> float:
        """When all work launched so far is done."""
        return max([self._host_s, *self._beside_s.values(), *self._engine_ready_s.values()])

    def _occupy(self, queue: Queue, engine: Engine, duration_s: float) -> None:
        worker = queue.device_index, engine
        start_s = max(self.host_s, queue.ready_s, self._engine_ready_s[worker])
        queue.ready_s = start_s + duration_s
        self._engine_ready_s[worker] = queue.ready_s
        self.busy_s[worker] += duration_s
        self.launches[worker] += 1
