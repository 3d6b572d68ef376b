"""The state of the simulated machine: devices and their random numbers, clock, streams, races.

There is one machine per process, because torch has one device type `sim`; `start` gives it fresh
parts. Tensors from before a start keep working and keep their own, older pool.

Each device draws from a generator of its own, apart from the host's. Its state moves only with
operations that run on the device; an operation that fails leaves it as it was.
`torch.Generator(device="sim")` cannot be made from Python: pass a CPU generator instead.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tenure._cuda_blocks import BLOCK_BYTES

from .._allocator import CachingPool, MemoryPool
from .._allocator._runtime import last_error
from .._torch_backend import DEVICE_TYPE
from ._clock import Clock, Rates
from ._host_memory import HostCopies
from ._races import RaceDetector, Span, VectorClock, merge_clocks

Allocator = Literal["exact", "cuda"]
# As torch's own default seed: c10/core/GeneratorImpl.h.
_DEFAULT_SEED = 67280421310721


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a start of the machine may choose; see `Simulator.__call__`."""

    devices: int = 1
    allocator: Allocator = "exact"
    budget_bytes: int | None = None
    round_to_bytes: int = 1
    rates: Rates = field(default_factory=Rates)
    detect_races: bool = True

    def __post_init__(self) -> None:
        _check_whole("devices", self.devices)
        _check_whole("round_to_bytes", self.round_to_bytes)
        if self.allocator == "cuda" and self.round_to_bytes not in (1, BLOCK_BYTES):
            raise ValueError(
                f'round_to_bytes={self.round_to_bytes}: allocator="cuda" rounds as CUDA does, to'
                f" {BLOCK_BYTES} bytes always. Leave it out."
            )
        if not isinstance(self.rates, Rates):
            raise ValueError(f"rates={self.rates!r}: give Rates(...), which names each speed.")
        if not isinstance(self.detect_races, bool):
            raise ValueError(f"detect_races={self.detect_races!r}: must be True or False.")


def _check_whole(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        # By its type: True is an int, and a mistake.
        raise ValueError(f"{name}={value!r}: must be a whole number, 1 or more.")


def _copied(state: torch.Tensor) -> torch.Tensor:
    # by no operation, so that a mode which makes tensors without data makes none of it
    generator = torch.Generator()
    generator.set_state(state)
    return generator.get_state()


class DeviceRandom:
    """The seeded state that random operations on the device draw from."""

    def __init__(self) -> None:
        # Without it one of two threads would leave the other's state behind.
        self._lock = threading.RLock()
        self.seed(_DEFAULT_SEED)

    def seed(self, seed: int) -> None:
        """Start the sequence that belongs to `seed`."""
        self.initial_seed = seed
        self._state = torch.Generator().manual_seed(seed).get_state()

    def state(self) -> torch.Tensor:
        """Return the state as uint8 on the host; a copy."""
        return _copied(self._state)

    def set_state(self, state: torch.Tensor) -> None:
        """Go back to a state from `state`."""
        self._state = _copied(state)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the host's default generator stand in for the device's inside the block."""
        with self._lock:
            host_state = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                yield
                self._state = torch.get_rng_state()
            finally:
                torch.set_rng_state(host_state)


@dataclass(slots=True)
class Device:
    """What each device has of its own; its streams are among the machine's.

    Attributes:
        has_context: whether a program has used it since the start, or turned to it; on CUDA that
            takes some hundred MiB of its memory.
    """

    pool: MemoryPool
    random: DeviceRandom
    has_context: bool = False


class Machine:
    """The simulated devices and the host beside them."""

    clock: Clock
    devices: list[Device]
    detector: RaceDetector
    host_copies: HostCopies
    host_seen: VectorClock
    streams: dict[int, Any]
    # This process was forked from one that had used a device.
    is_in_bad_fork = False

    def __init__(self) -> None:
        # Outside of start(): a fresh start seeds none of them anew.
        self._random: list[DeviceRandom] = []
        self.start(Settings())

    def start(self, settings: Settings) -> None:
        """Begin afresh: virtual time zero, nothing allocated, no streams."""
        self.settings = settings
        self.clock = Clock(settings.rates)
        self.devices = [self._device(index) for index in range(settings.devices)]
        self.detector = RaceDetector(enabled=settings.detect_races)
        self.host_copies = HostCopies(self.detector)
        self.host_seen = {}
        self.streams = {}

    def _device(self, index: int) -> Device:
        if index == len(self._random):
            self._random.append(DeviceRandom())
        return Device(_pool(self.settings, self.clock, index), self._random[index])

    @property
    def contexts(self) -> set[int]:
        """The indexes of the devices that have a context."""
        return {index for index, device in enumerate(self.devices) if device.has_context}

    def owns(self, stream: Any) -> bool:
        """Return whether the stream was made since the last start."""
        return self.streams.get(stream.number) is stream

    def launch(self, by: str, stream: Any, reads: list[Span], writes: list[Span]) -> None:
        """Count a launch of the operator `by`: it runs after all that the host has waited for."""
        self.devices[stream.device_index].has_context = True
        merge_clocks(stream.seen, self.host_seen)
        self.detector.launch(by, stream.number, stream.seen, reads, writes)

    def forbid_in_bad_fork(self) -> None:
        """Refuse the use of a device in a forked child, where CUDA's context is not valid.

        Source: `_lazy_init` of torch.cuda, whose words these are.
        """
        if self.is_in_bad_fork:
            raise RuntimeError(
                f"Cannot re-initialize {DEVICE_TYPE} in forked subprocess. To use {DEVICE_TYPE}"
                " with multiprocessing, you must use the 'spawn' start method. A worker of a"
                " DataLoader gives host tensors; move them in the process that reads them."
            )

    def host_waits(self, until_s: float, seen: VectorClock) -> None:
        """Stop the host until work that ends at `until_s`, with vector clock `seen`, is done."""
        self.clock.wait(until_s)
        self._host_passes(seen)

    def host_polls(self, until_s: float, seen: VectorClock) -> bool:
        """Ask whether that work is done; a yes orders the host after it."""
        done = self.clock.poll(until_s)
        if done:
            self._host_passes(seen)
        else:
            # torch clears "not ready", and with it what was there before.
            last_error.clear()
        return done

    def synchronize(self, index: int) -> None:
        """Stop the host until the work of every stream of a device is done."""
        self.forbid_in_bad_fork()
        self.devices[index].has_context = True
        streams = [s for s in self.streams.values() if s.device_index == index]
        seen = VectorClock()
        for stream in streams:
            merge_clocks(seen, stream.seen)
        self.host_waits(max((stream.ready_s for stream in streams), default=0.0), seen)

    def _host_passes(self, seen: VectorClock) -> None:
        # Another one: a thread of autograd's may be reading what it was.
        merged = dict(self.host_seen)
        merge_clocks(merged, seen)
        self.host_seen = merged
        self.host_copies.settle(self.host_seen)


def _pool(settings: Settings, clock: Clock, index: int) -> MemoryPool:
    if settings.allocator == "cuda":
        return CachingPool(settings.budget_bytes, clock.wait, clock.finished_s, index)
    return MemoryPool(settings.budget_bytes, clock.wait, index, settings.round_to_bytes)


machine = Machine()


def _note_fork() -> None:
    machine.is_in_bad_fork = machine.is_in_bad_fork or bool(machine.contexts)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
