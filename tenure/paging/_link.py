"""The streams of a device and the copies over its link; every stream that waits waits here.

Written against the device's module, so that it is the same on every accelerator. What passes move
and wait for is counted in events, which only a report reads.

Invariant: the device is the current one wherever the module is asked to do something, and what was
current before is so again after. Otherwise CUDA would make a context on whichever device is current
now: torch leaves it on leaving a stream of another device, or where the host waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tenure._registries import NamedTensor

Span = tuple[Any, Any]
"""The timed events before something and after it."""


@dataclass(slots=True)
class PassRecord:
    """One pass, in events.

    Attributes:
        span: its first and its last event on the stream that computes.
        stalls: the waits of that stream for copies.
        copies: the copies to the device since the pass before ended.
        copied_bytes: what they moved.
        faults: how many units were fetched only when they were used.
    """

    span: Span | None = None
    stalls: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    copied_bytes: int = 0
    faults: int = 0

    @property
    def whole_s(self) -> float:
        """How long it took on the device; its events must have happened, here and below."""
        return seconds([] if self.span is None else [self.span])

    @property
    def stall_s(self) -> float:
        """How much of it computation waited for copies."""
        return min(self.whole_s, seconds(self.stalls))

    @property
    def compute_s(self) -> float:
        """The rest."""
        return self.whole_s - self.stall_s

    @property
    def copy_s(self) -> float:
        """How long the copies took."""
        return seconds(self.copies)

    @property
    def link_bytes_per_s(self) -> float:
        """How fast they ran; 0 where there was none."""
        copy_s = self.copy_s
        return self.copied_bytes / copy_s if copy_s else 0.0

    def ends(self) -> list[Any]:
        """Return the events that it all ends with."""
        spans = [*([] if self.span is None else [self.span]), *self.copies, *self.stalls]
        return [end for _, end in spans]


class PassMeter:
    """Is told what goes over a link, and keeps it pass by pass.

    Attributes:
        now: the pass that runs, or the next one.
        last: the last pass that ended; None before the first.
        passes: how many have ended.
        total_faults: of all passes that ended.
    """

    def __init__(self) -> None:
        # Opened where the pass before it ends: what is fetched for a pass before it begins is its.
        self.now = PassRecord()
        self._began: Any = None
        self.last: PassRecord | None = None
        self.passes = 0
        self.total_faults = 0

    def begin(self, event: Any) -> None:
        """Begin a pass with this event."""
        self._began = event

    def end(self, event: Any) -> None:
        """End the pass with this event."""
        self.now.span = self._began, event
        self.total_faults += self.now.faults
        self.passes += 1
        self.last, self.now = self.now, PassRecord()

    def note_copy(self, span: Span, n_bytes: int) -> None:
        """Note a copy of so many bytes to the device."""
        self.now.copies.append(span)
        self.now.copied_bytes += n_bytes


def seconds(spans: Iterable[Span]) -> float:
    """Return how long several took together."""
    return sum(float(begin.elapsed_time(end)) for begin, end in spans) / 1e3


class Link:
    """A stream into the device and one out of it, beside those that compute.

    Args:
        device: the device, with its index.
        module: the device's; None for torch's own.

    Attributes:
        meter: is told of copies to the device, and of waits for copies.
        staging_bytes: host memory between files and the device: none, where weights are in memory.
        pinned_bytes: how much of it is pinned.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device, self.meter = device, PassMeter()
        self.module: Any = module or torch.get_device_module(device)
        self._in = self.module.Stream(device=device)
        self._out = self.module.Stream(device=device)
        self.staging_bytes = self.pinned_bytes = 0

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Return the staging memory, for reports of memory."""
        return iter(())

    def current(self) -> Any:
        """Return the stream that computes now."""
        return self.module.current_stream(self.device)

    def mark(self, stream: Any, *, timed: bool = False) -> Any:
        """Return an event after all work of a stream so far; a timed event is more expensive."""
        event = self.module.Event(enable_timing=timed)
        event.record(stream)
        return event

    def page_in(self, pairs: list[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """Copy host bytes into device bytes; the event after the copies.

        Args:
            pairs: each a destination on the device and its source on the host.
            after: the events that the destinations and the sources are in use until.
        """
        # Synchronization strategy: the destination may still be read by kernels, the source still
        # be written by a copy to the host; each is an event of another stream.
        for event in after:
            self._in.wait_event(event)
        before = self.mark(self._in, timed=True)
        with self._on(self._in):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        ready = self.mark(self._in, timed=True)
        self.meter.note_copy((before, ready), sum(to.nbytes for to, _ in pairs))
        return ready

    def page_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """Copy device tensors to host tensors; the event after which the host may read them."""
        # Synchronization strategy: the kernels that write these tensors run on other streams.
        for event in after:
            self._out.wait_event(event)
        with self._on(self._out):
            for to, source in pairs:
                self._copy_out(to, source)
        return self.mark(self._out)

    def let_compute(self, stream: Any, event: Any) -> None:
        """Let what a stream is given from now on wait for an event, and measure the wait."""
        before = self.mark(stream, timed=True)
        self.let_wait(stream, event)
        self.meter.now.stalls.append((before, self.mark(stream, timed=True)))

    def let_wait(self, stream: Any, event: Any) -> None:
        """Let what a stream is given from now on wait for an event."""
        stream.wait_event(event)

    def check(self, event: Any) -> None:
        """Raise what kept a copy from its source; of memory, nothing does."""

    def let_host(self, event: Any) -> None:
        """Stop the host until an event."""
        with self._here():
            event.synchronize()

    def is_past(self, event: Any) -> bool:
        """Return whether an event has happened, without a stop."""
        with self._here():
            return bool(event.query())

    def close(self) -> None:
        """Give back what the link itself took."""

    def finish(self) -> None:
        """Stop the host until the device has nothing left to do."""
        self.module.synchronize(self.device)

    def _copy_out(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def _here(self) -> AbstractContextManager[Any]:
        """Return a block in which the device is the current one."""
        return self.module.device(self.device)  # type: ignore[no-any-return]

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Return the same, and a stream of it the current one."""
        with self._here(), self.module.stream(stream):
            yield
