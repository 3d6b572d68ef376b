"""The state of the simulated machine: memory, clock, streams, races, host copies, random numbers.

There is one machine per process, because torch has one device of the type `sim`; `start` gives it
fresh parts. Tensors from before a start keep working and keep their own, older pool.
"""

from dataclasses import dataclass, field
from typing import Any

from ._clock import Clock
from ._generator import DeviceRandom
from ._host_copies import HostCopies
from ._memory import MemoryPool
from ._races import RaceDetector, Span, VectorClock, merge_clocks
from ._rates import Rates


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a start of the machine may choose; see `Simulator.__call__`."""

    budget_bytes: int | None = None
    round_to_bytes: int = 1
    rates: Rates = field(default_factory=Rates)
    detect_races: bool = True


class Machine:
    """The parts of the simulated device and of the host beside it."""

    clock: Clock
    pool: MemoryPool
    detector: RaceDetector
    host_copies: HostCopies
    host_seen: VectorClock
    streams: dict[int, Any]

    def __init__(self) -> None:
        self.random = DeviceRandom()
        self.start(Settings())

    def start(self, settings: Settings) -> None:
        """Begin afresh: virtual time zero, nothing allocated, no streams."""
        self.settings = settings
        self.clock = Clock(settings.rates)
        self.pool = MemoryPool(
            settings.budget_bytes, settings.round_to_bytes, wait_host=self.clock.wait
        )
        self.detector = RaceDetector(enabled=settings.detect_races)
        self.host_copies = HostCopies(self.detector)
        self.host_seen = {}
        self.streams = {}

    def owns(self, stream: Any) -> bool:
        """Whether the stream was made since the last start."""
        return self.streams.get(stream.stream_id) is stream

    def launch(self, by: str, stream: Any, reads: list[Span], writes: list[Span]) -> None:
        """Count a launch of the operator `by`: it runs after all that the host has waited for."""
        merge_clocks(stream.seen, self.host_seen)
        self.detector.launch(by, stream.stream_id, stream.seen, reads, writes)

    def host_waits(self, until_s: float, seen: VectorClock) -> None:
        """Stop the host until work that ends at `until_s`, with vector clock `seen`, is done."""
        self.clock.wait(until_s)
        self._host_passes(seen)

    def host_polls(self, until_s: float, seen: VectorClock) -> bool:
        """Ask whether that work is done; a yes orders the host after it."""
        done = self.clock.poll(until_s)
        if done:
            self._host_passes(seen)
        return done

    def synchronize(self) -> None:
        """Stop the host until every stream's work is done."""
        streams, seen = list(self.streams.values()), VectorClock()
        for stream in streams:
            merge_clocks(seen, stream.seen)
        self.host_waits(max((stream.ready_s for stream in streams), default=0.0), seen)

    def _host_passes(self, seen: VectorClock) -> None:
        merge_clocks(self.host_seen, seen)
        self.host_copies.settle(self.host_seen)


machine = Machine()
