"""The streams of a device and the copies over its link; every stream that waits waits here.

Written against the device's module, so that it is the same on every accelerator.

Invariant: the device is the current one wherever the module is asked to do something, and what was
current before is so again after. Otherwise CUDA would make a context on whichever device is current
now: torch leaves it on leaving a stream of another device, or where the host waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from tenure._registries import NamedTensor

Span = tuple[Any, Any]
"""The timed events before something and after it."""


class Link:
    """A stream into the device and one out of it, beside those that compute.

    Args:
        device: the device, with its index.
        module: the device's; None for torch's own.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module: Any = module or torch.get_device_module(device)
        self._in = self.module.Stream(device=device)
        self._out = self.module.Stream(device=device)

    @property
    def staging_bytes(self) -> int:
        """Host memory between files and the device: none, weights are in memory."""
        return 0

    @property
    def pinned_bytes(self) -> int:
        """How much of it is pinned."""
        return 0

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

    def page_in(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Span:
        """Copy host bytes into device bytes; the timed events before the copies and after them.

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
        return before, self.mark(self._in, timed=True)

    def page_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """Copy device tensors to host tensors; the event after which the host may read them."""
        # Synchronization strategy: the kernels that write these tensors run on other streams.
        for event in after:
            self._out.wait_event(event)
        with self._on(self._out):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return self.mark(self._out)

    def let_compute(self, stream: Any, event: Any) -> Span:
        """Let what a stream is given from now on wait for an event.

        Returns:
            The timed events before the wait and after it.
        """
        before = self.mark(stream, timed=True)
        self._let_wait(stream, event)
        return before, self.mark(stream, timed=True)

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

    def _let_wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def _here(self) -> AbstractContextManager[Any]:
        """Return a block in which the device is the current one."""
        return self.module.device(self.device)  # type: ignore[no-any-return]

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Return the same, and a stream of it the current one."""
        with self._here(), self.module.stream(stream):
            yield
