"""Streams and events of the simulated device, with the interface of `torch.cuda`.

A stream carries two clocks: `ready_s`, the virtual time at which its work ends, and `seen`, the
vector clock of the race detector. An event is a copy of both; every wait takes the later of each.
What was recorded before the machine was started afresh orders nothing: those clocks are gone.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, Self

import torch

from tenure._torch.autograd import is_running_node

from .._allocator import CAPTURE_ISOLATION, CAPTURED_EVENT, error_of
from .._torch_backend import DEVICE_TYPE, DEVICE_TYPE_NUMBER
from ._backward_streams import Pass, StreamLog
from ._capture import Capture
from ._clock import Clock
from ._machine import machine
from ._races import VectorClock, default_number, merge_clocks
from ._which import current_index, index_of, made_current, turn_back, turn_to

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
        self._capture: Capture | None = None
        self._captured: VectorClock = {}

    @property
    def is_recorded(self) -> bool:
        """Whether this event marks a point since the machine was last started."""
        return self.at_s is not None and self._clock is machine.clock

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
        if recorded.capture is not None:
            recorded.capture.require_intact()
        self._capture = recorded.capture
        self._captured = dict(recorded.captured)

    def wait(self, stream: "Stream | None" = None) -> None:
        """Make later work of `stream` (the current one) wait for this point."""
        (stream or current_stream()).wait_event(self)

    def hold_up(self, stream: "Stream") -> None:
        """Order `stream` after this point, which is recorded.

        In the capture of a graph a stream that waits for work of the capture joins it.

        Raises:
            torch.AcceleratorError: one of the two is in a capture that the other is not in.
        """
        if self._capture is None:
            if stream.capture is not None:
                stream.capture.fail(CAPTURE_ISOLATION)
            stream.ready_s = max(stream.ready_s, self.at_s or 0.0)
            merge_clocks(stream.seen, self.seen)
            return
        self._require_capture_under_way()
        stream.capture = self._capture
        merge_clocks(stream.captured, self._captured)

    def _require_capture_under_way(self) -> None:
        if self._capture is not None and self._capture.is_over:
            raise error_of(CAPTURED_EVENT)

    def _forbid_if_captured(self) -> None:
        """Refuse what needs this point to pass, if it lies in a graph, where it never does."""
        if self._capture is not None:
            self._require_capture_under_way()
            self._capture.fail(CAPTURED_EVENT)

    def query(self) -> bool:
        """Whether the host's clock has passed this point; if so the host is ordered after it.

        As with `synchronize`, the runtime makes a context on the current device, not the event's.
        """
        if self.at_s is None or not self.is_recorded:
            return True
        machine.devices[current_index()].has_context = True
        self._forbid_if_captured()
        return machine.host_polls(self.at_s, self.seen)

    def synchronize(self) -> None:
        """Stop the host until this point."""
        if self.at_s is not None and self.is_recorded:
            machine.devices[current_index()].has_context = True
            self._forbid_if_captured()
            machine.host_waits(self.at_s, self.seen)

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds of virtual time from this event to `end_event`."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at_s is None or end_event.at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        self._forbid_if_captured()
        end_event._forbid_if_captured()
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
    capture: Capture | None
    captured: VectorClock

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
        self.capture = None
        self.captured = {}
        machine.streams[self.number] = self

    @property
    def number(self) -> int:
        """What tells this stream from all others."""
        return number_of(self)

    def wait_event(self, event: Event) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make later work wait for `event`; one that was never recorded holds nothing up."""
        if event.is_recorded:
            machine.devices[self.device_index].has_context = True
            event.hold_up(self)

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
        machine.forbid_in_capture()
        with made_current(self.device_index):
            self.record_event().synchronize()

    def query(self) -> bool:
        """Whether the host's clock has passed this stream's work."""
        machine.forbid_in_capture()
        with made_current(self.device_index):
            return self.record_event().query()

    def __enter__(self) -> Self:
        _current.outer.append((current_index(), _current.streams.get(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        index, stream = _current.outer.pop()
        _choose(self.device_index, stream)
        # As torch.cuda.stream does: this makes a context where there was none.
        turn_to(index)

    def __repr__(self) -> str:
        return f"<sim.Stream {self.stream_id}, ready_s={self.ready_s:.6f}, on {self.device}>"


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, Stream | None] = {}
        self.outer: list[tuple[int, Stream | None]] = []
        self.log = StreamLog()


_current = _PerThread()
_passes: list[Pass] = []


def number_of(stream: torch.Stream) -> int:
    """What tells a stream from all others: the default ones have one id, 0, as on CUDA."""
    return stream.stream_id or default_number(stream.device_index)


def default_stream(device: Any = None) -> Stream:
    """The stream of a device that is current where no other was chosen."""
    index = index_of(device)
    return machine.streams.get(default_number(index)) or Stream(index, stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """The stream that launches of this thread on a device, the current one, go to.

    A node of a backward pass works on the stream of its forward; a thread that chose none, on the
    default stream. All work on a device asks this before it begins.
    """
    machine.forbid_in_bad_fork()
    index = index_of(device)
    own, lent = _current.streams.get(index), _stream_of_node(index)
    if lent is not None and own is lent[1]:
        # It was chosen around the pass, and not in it.
        own = None
    for chosen in (own, lent and lent[0]):
        if chosen is not None and chosen.device_index == index and machine.owns(chosen):
            return chosen
    return default_stream(index)


def _stream_of_node(index: int) -> tuple[Stream | None, Stream | None] | None:
    """The stream of the node that runs in this thread, and what the thread chose around it."""
    if not _passes or not is_running_node():
        return None
    return _passes[-1].stream(index), _passes[-1].chosen_around(index)


@contextlib.contextmanager
def lent_to_autograd(roots: list[Any]) -> Iterator[None]:
    """Context of a backward pass from these nodes: they work on the streams of their forward."""
    around = [current_stream(index) for index in range(len(machine.devices))]
    made = Pass(roots, _current.log, around, machine.owns)
    _passes.append(made)
    outer, machine.passing = machine.passing, made
    clock = machine.clock
    clock.begin_backward()
    try:
        yield
    finally:
        clock.end_backward()
        machine.passing = outer
        # Not the last one: another thread may have begun a pass since.
        _passes.remove(made)
        made.finish()


def set_stream(stream: Stream | None) -> None:
    """Make `stream` and its device the current ones of this thread; None changes nothing."""
    if stream is not None:
        index = _require_stream(stream).device_index
        turn_to(index)
        _choose(index, stream)


def forget_choices() -> None:
    """Make the default streams and the first device current in this thread, as at its start."""
    turn_back(0)
    _current.streams.clear()
    _current.log = StreamLog()


def _choose(index: int, stream: Stream | None) -> None:
    before = current_stream(index)
    _current.streams[index] = stream
    _current.log.note(index, before, current_stream(index))


def _require_stream(stream: Any) -> Stream:
    if isinstance(stream, Stream):
        return stream
    raise TypeError(
        f"{stream!r} is not a stream of {DEVICE_TYPE}: nothing would order its work."
        f" Make one with torch.{DEVICE_TYPE}.Stream()."
    )


class stream:
    """Context in which `chosen` is the current stream; None changes nothing."""

    def __init__(self, chosen: Stream | None) -> None:
        self._chosen = None if chosen is None else _require_stream(chosen)

    def __enter__(self) -> None:
        if self._chosen is not None:
            self._chosen.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._chosen is not None:
            self._chosen.__exit__(*error)
