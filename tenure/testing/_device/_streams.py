"""Streams and events of the simulated device, with the interface of `torch.cuda`.

A stream carries two clocks: `ready_s`, the virtual time at which its work ends, and `seen`, the
vector clock of the race detector. An event is a copy of both; every wait takes the later of each.
What was recorded before the machine was started afresh orders nothing: those clocks are gone.
"""

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from tenure._torch.autograd import is_running_node

from .._torch_backend import DEVICE_TYPE, DEVICE_TYPE_NUMBER
from ._clock import Clock
from ._machine import machine
from ._races import VectorClock, default_number, merge_clocks
from ._which import current_device, index_of, made_current, this_thread, turn_back, turn_to

_stream_ids = itertools.count(1)


class Event:
    """A point in a stream's work.

    Args:
        enable_timing: whether `elapsed_time` may be asked.
        *unused: accepted as on CUDA, without effect.
        **unused_names: likewise.
    """

    def __init__(self, enable_timing: bool = False, *unused: Any, **unused_names: Any) -> None:
        self.enable_timing = enable_timing
        self.at_s: float | None = None
        self.seen: VectorClock = {}
        self._clock: Clock | None = None
        self._index: int | None = None

    def time_s(self) -> float | None:
        """Return the time that this event marks; None if it was not since the last start."""
        return self.at_s if self._clock is machine.clock else None

    def record(self, stream: "Stream | None" = None) -> None:
        """Mark the end of what is launched on `stream` (the current one) so far.

        Raises:
            RuntimeError: the event belongs to another device, where it was recorded first.
        """
        recorded = current_stream() if stream is None else _require_stream(stream)
        if self._index not in (None, recorded.device_index):
            raise RuntimeError(
                f"Event device {self._index} does not match recording stream's device"
                f" {recorded.device_index}."
            )
        self._index = recorded.device_index
        machine.devices[self._index].has_context = True
        self.at_s = recorded.ready_s
        self.seen = dict(recorded.seen)
        self._clock = recorded.clock

    def wait(self, stream: "Stream | None" = None) -> None:
        """Make later work of `stream` (the current one) wait for this point."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether the host's clock has passed this point; the host is then ordered after it.

        As with `synchronize`, the runtime makes a context on the current device, not the event's.
        """
        at_s = self.time_s()
        if at_s is None:
            return True
        machine.devices[current_device()].has_context = True
        return machine.host_polls(at_s, self.seen)

    def synchronize(self) -> None:
        """Stop the host until this point."""
        at_s = self.time_s()
        if at_s is not None:
            machine.devices[current_device()].has_context = True
            machine.host_waits(at_s, self.seen)

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds of virtual time from this event to `end_event`."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at_s is None or end_event.at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event.at_s - self.at_s) * 1e3

    def __repr__(self) -> str:
        return f"<sim.Event at_s={self.at_s}>"


class Stream(torch.Stream):
    """Work that runs in the order of its launches.

    Args:
        device: `sim:0` or another index; the current device if not given.
        priority: accepted as on CUDA, without effect.
        stream_id: for the default stream only.
    """

    ready_s: float
    seen: VectorClock

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> Any:
        chosen = next(_stream_ids) if stream_id is None else stream_id
        return super().__new__(
            cls,
            stream_id=chosen,
            device_index=index_of(device),
            device_type=DEVICE_TYPE_NUMBER,
        )

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> None:
        if stream_id is None:
            machine.devices[self.device_index].has_context = True
        self.priority = priority
        self.clock = machine.clock
        self.ready_s = 0.0
        self.seen = {}
        machine.streams[self.number] = self

    @property
    def number(self) -> int:
        """What tells this stream from all others."""
        return number_of(self)

    def wait_event(self, event: Event) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make later work wait for `event`; one that was never recorded holds nothing up."""
        at_s = event.time_s()
        if at_s is not None:
            machine.devices[self.device_index].has_context = True
            self.ready_s = max(self.ready_s, at_s)
            merge_clocks(self.seen, event.seen)

    def wait_stream(self, stream: "Stream") -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make later work wait for all that is launched on `stream` so far."""
        self.wait_event(_require_stream(stream).record_event())

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record `event`, or a new one, at the end of this stream's work."""
        recorded = event or Event()
        recorded.record(self)
        return recorded

    def synchronize(self) -> None:
        """Stop the host until this stream's work is done."""
        with made_current(self.device_index):
            self.record_event().synchronize()

    def query(self) -> bool:
        """Return whether the host's clock has passed this stream's work."""
        with made_current(self.device_index):
            return self.record_event().query()

    def __enter__(self) -> Self:
        this_thread.outer.append((current_device(), this_thread.streams.get(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        index, stream = this_thread.outer.pop()
        this_thread.streams[self.device_index] = stream
        # As torch.cuda.stream does: this makes a context where there was none.
        turn_to(index)

    def __repr__(self) -> str:
        return f"<sim.Stream {self.stream_id}, ready_s={self.ready_s:.6f}, on {self.device}>"


# The streams around each backward pass under way, by device.
_passes: list[list[Stream]] = []


def number_of(stream: torch.Stream) -> int:
    """Return the key of a stream: the default streams share the id 0, as on CUDA."""
    return stream.stream_id or default_number(stream.device_index)


def default_stream(device: Any = None) -> Stream:
    """Return the stream of a device that is current where no other was chosen."""
    index = index_of(device)
    return machine.streams.get(default_number(index)) or Stream(index, stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """Return the stream that launches of this thread on a device, the current one, go to.

    In a backward pass that is the stream around it, for a thread that chose no other. All work on
    a device asks this before it begins.
    """
    machine.forbid_in_bad_fork()
    index = index_of(device)
    chosen: Stream | None = this_thread.streams.get(index)
    if chosen is None and _passes and is_running_node():
        chosen = _passes[-1][index]
    return chosen if chosen is not None and machine.owns(chosen) else default_stream(index)


@contextlib.contextmanager
def lent_to_autograd() -> Iterator[None]:
    """Context of a backward pass: its nodes work on the streams that are current around it."""
    around = [current_stream(index) for index in range(len(machine.devices))]
    _passes.append(around)
    clock = machine.clock
    clock.begin_backward()
    try:
        yield
    finally:
        clock.end_backward()
        # Not the last one: another thread may have begun a pass since.
        _passes.remove(around)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` and its device the current ones of this thread; None changes nothing."""
    if stream is not None:
        index = _require_stream(stream).device_index
        turn_to(index)
        this_thread.streams[index] = stream


def forget_choices() -> None:
    """Make the default streams and the first device current in this thread, as at its start."""
    turn_back(0)
    this_thread.streams.clear()


def _require_stream(stream: Any) -> Stream:
    if isinstance(stream, Stream):
        return stream
    raise TypeError(
        f"{stream!r} is not a stream of {DEVICE_TYPE}: nothing would order its work."
        f" Make one with torch.{DEVICE_TYPE}.Stream()."
    )


def stream(chosen: Stream | None) -> AbstractContextManager[object]:
    """Context in which `chosen` is the current stream; None changes nothing."""
    return contextlib.nullcontext() if chosen is None else _require_stream(chosen)
