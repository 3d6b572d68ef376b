"""The link where the CPU computes: from files into the memory that weights pass through.

Invariant: the host computes when it is asked to, so what was computed before a copy is asked for is
over; copies run one after the other on the reader's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from .._host import Done, Reader, past, raise_anew
from ._link import Link, copy_if_other


class HostLink(Link):
    """A link that reads files.

    Args:
        reader: the thread to read them on.
    """

    def __init__(self, reader: Reader) -> None:
        self.device = torch.device("cpu")
        self._reader = reader
        self._stream = HostStream()

    def current(self) -> HostStream:
        """The host, computing."""
        return self._stream

    def mark(self, stream: Any, *, timed: bool = False) -> HostEvent:
        """Now: all that was asked for is computed."""
        now_s = time.perf_counter()
        return HostEvent(past(Done(now_s, now_s)))

    def page_in(
        self, pairs: Iterable[tuple[Tensor, Any]], after: Iterable[Any]
    ) -> tuple[HostEvent, HostEvent]:
        """As of a link, of bytes of files."""
        # Synchronization strategy: no wait for `after`. The host has computed whatever used the
        # place when it asks for this copy, and the reader's other copies are done in order.
        read = self._reader.submit(_reading(list(pairs)))
        return HostEvent(read, is_begin=True), HostEvent(read)

    def page_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Any]) -> HostEvent:
        """As of a link, and at once."""
        for to, source in pairs:
            copy_if_other(to, source)
        return self.mark(self._stream)

    def check(self, event: HostEvent) -> None:
        """Stop the host until a read is over.

        Raises:
            PagingError: it failed.
        """
        event.check()

    def _let_wait(self, stream: Any, event: HostEvent) -> None:
        """Stop the host, the only stream, until a read is over.

        Raises:
            PagingError: it failed.
        """
        # Synchronization strategy: the host is the only stream, so it waits itself; else it would
        # compute with the bytes of the unit that was there before.
        event.check()

    def release_cached(self) -> None:
        """Nothing is cached."""

    def is_past(self, event: HostEvent) -> bool:
        """Whether a read is over."""
        return event.query()

    def let_host(self, event: HostEvent) -> None:
        """Stop the host until a read is over, whether it failed or not."""
        event.synchronize()

    def finish(self) -> None:
        """Stop the host until nothing is being read."""
        self._reader.drain()


class HostStream:
    """The host as a stream: there is one."""

    stream_id = 0


class HostEvent:
    """The begin or the end of a read, or a moment that has passed.

    Args:
        read: the read.
        is_begin: whether its begin is meant.
    """

    __slots__ = ("_is_begin", "_read")

    def __init__(self, read: Future[Done], *, is_begin: bool = False) -> None:
        self._read, self._is_begin = read, is_begin

    @property
    def at_s(self) -> float:
        """When it happened; waits for it."""
        done = self._read.result()
        return done.began_s if self._is_begin else done.ended_s

    def query(self) -> bool:
        """Whether it has happened."""
        return self._read.done()

    def synchronize(self) -> None:
        """Wait for it, whether the read failed or not."""
        self._read.result()

    def check(self) -> None:
        """Wait for it.

        Raises:
            PagingError: the read failed.
        """
        raise_anew(self._read.result().error)

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to another."""
        return (end.at_s - self.at_s) * 1e3


def _reading(pairs: list[tuple[Tensor, Any]]) -> Callable[[], None]:
    def read() -> None:
        # Each let go when it is read: a failed read may be kept, and would keep its unit's memory.
        while pairs:
            to, source = pairs.pop(0)
            source.read_into(to)

    return read
