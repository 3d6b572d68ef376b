"""Streams and events of the simulated device, with the interface of `torch.cuda`.

A stream carries two clocks: `ready_s`, the virtual time at which its work ends, and `seen`, the
vector clock of the race detector. An event is a copy of both; every wait takes the later of each.
What was recorded before the machine was started afresh orders nothing: those clocks are gone.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch

from ._clock import Clock
from ._dispatch import require_own_device
from ._machine import machine
from ._races import VectorClock, merge_clocks
from ._torch_backend import DEVICE_TYPE, DEVICE_TYPE_NUMBER, is_inside_backward

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

    @property
    def is_recorded(self) -> bool:
        """Whether this event marks a point since the machine was last started."""
        return self.at_s is not None and self._clock is machine.clock

    def record(self, stream: "Stream | None" = None) -> None:
        """Mark the end of what is launched on `stream` (the current one) so far."""
        recorded = current_stream() if stream is None else _require_stream(stream)
        self.at_s = recorded.ready_s
        self.seen = dict(recorded.seen)
        self._clock = recorded.clock

    def wait(self, stream: "Stream | None" = None) -> None:
        """Make later work of `stream` (the current one) wait for this point."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether the host's clock has passed this point; if so the host is ordered after it."""
        if self.at_s is None or not self.is_recorded:
            return True
        return machine.host_polls(self.at_s, self.seen)

    def synchronize(self) -> None:
        """Stop the host until this point."""
        if self.at_s is not None and self.is_recorded:
            machine.host_waits(self.at_s, self.seen)

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
        device: `sim` or `sim:0`.
        priority: accepted as on CUDA, without effect.
        stream_id: for the default stream only.
    """

    ready_s: float
    seen: VectorClock

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> Any:
        number = next(_stream_ids) if stream_id is None else stream_id
        return super().__new__(
            cls, stream_id=number, device_index=0, device_type=DEVICE_TYPE_NUMBER
        )

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> None:
        if device is not None:
            require_own_device(torch.device(device))
        self.priority = priority
        self.clock = machine.clock
        self.ready_s = 0.0
        self.seen = {}
        machine.streams[self.stream_id] = self

    def wait_event(self, event: Event) -> None:
        """Make later work wait for `event`; one that was never recorded holds nothing up."""
        if event.at_s is not None and event.is_recorded:
            self.ready_s = max(self.ready_s, event.at_s)
            merge_clocks(self.seen, event.seen)

    def wait_stream(self, stream: "Stream") -> None:
        """Make later work wait for all that is launched on `stream` so far."""
        self.wait_event(_require_stream(stream).record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, at the end of this stream's work."""
        recorded = event or Event()
        recorded.record(self)
        return recorded

    def synchronize(self) -> None:
        """Stop the host until this stream's work is done."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Whether the host's clock has passed this stream's work."""
        return self.record_event().query()

    def __enter__(self) -> Self:
        _current.outer.append(_current.stream)
        set_stream(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        set_stream(_current.outer.pop())

    def __repr__(self) -> str:
        return f"<sim.Stream {self.stream_id}, ready_s={self.ready_s:.6f}>"


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.outer: list[Stream | None] = []


_current = _PerThread()
_main_thread = threading.main_thread()
_main_stream: list[Stream] = []
_around_backward: list[Stream] = []


def default_stream(device: Any = None) -> Stream:
    """The stream that is current where no other was chosen."""
    return machine.streams.get(0) or Stream(stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """The stream that launches of this thread go to.

    A thread of autograd works on the stream around `backward()`; any other thread that chose none
    works on the stream of the main thread.
    """
    if _current.stream is not None and machine.owns(_current.stream):
        return _current.stream
    if _around_backward and is_inside_backward() and machine.owns(_around_backward[-1]):
        return _around_backward[-1]
    if _main_stream and machine.owns(_main_stream[0]):
        return _main_stream[0]
    return default_stream()


@contextlib.contextmanager
def lent_to_autograd() -> Iterator[None]:
    """Context of a backward pass: autograd's threads work on the stream of this one."""
    lent = current_stream()
    _around_backward.append(lent)
    try:
        yield
    finally:
        _around_backward.remove(lent)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` the current one of this thread; None takes the choice back."""
    if stream is not None:
        _require_stream(stream)
    _current.stream = stream
    if threading.current_thread() is _main_thread:
        _main_stream[:] = [] if stream is None else [stream]


def _require_stream(stream: Any) -> Stream:
    if isinstance(stream, Stream):
        return stream
    raise TypeError(
        f"{stream!r} is not a stream of {DEVICE_TYPE}:0: nothing would order its work."
        f" Make one with torch.{DEVICE_TYPE}.Stream()."
    )


class stream:
    """Context in which `chosen` is the current stream; None changes nothing."""

    def __init__(self, chosen: Stream | None) -> None:
        self._chosen = None if chosen is None else _require_stream(chosen)

    def __enter__(self) -> None:
        if self._chosen is not None:
            self._chosen.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._chosen is not None:
            self._chosen.__exit__(kind, error, traceback)
