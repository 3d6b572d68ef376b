"""The thread that reads files, and a link of which the host's side lies in them.

One thread reads. Where the CPU computes, it reads into the memory that weights pass through; for a
device it reads into staging memory, and launches the copy. Units are read and copied in the order
of asking; a piece of staging memory is read into again only after the copy from it. An error stands
in the result, and nothing is raised where it is read.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tenure._account import taken
from tenure._graph_capture import captures_somewhere
from tenure._registries import NamedTensor
from tenure._torch.quiet import aside

from ._host_buffers import Pinning
from ._link import Link, Span

STAGING = "paged: staging"
"""The name in reports of memory of the host memory between files and a device."""
_N_SLOTS = 4
_SLOT_BYTES = 16 * 2**20
"""The most that is read at once for a device; as much is staged a few times."""
_CAPTURE_S = 0.001

_Pairs = list[tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Done:
    """A read that is over.

    Attributes:
        began_s: when it began, by ``time.perf_counter``.
        ended_s: when it ended.
        error: why it failed, if it did.
        span: what the read returned.
    """

    began_s: float
    ended_s: float
    error: BaseException | None = None
    span: Any = None


class Reader:
    """One thread, started with the first read; a forked process gets one of its own."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._thread: int | None = None
        self._last: Future[Done] | None = None
        _readers[id(self)] = self

    def submit(self, read: Callable[[], object]) -> Future[Done]:
        """Have something read after all that was asked for before."""
        try:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, thread_name_prefix="tenure-reader")
            self._last = self._threads.submit(self._on_thread, read)
        except RuntimeError:
            # Python ends the threads of pools before it waits for other threads, and before it
            # calls functions of atexit. Then, and if no thread can be started, the caller reads.
            self.drain()
            self._thread = None
            self._last = Future()
            self._last.set_result(_timed(read))
        return self._last

    @property
    def is_current(self) -> bool:
        """True on its own thread; a garbage collection there may close anything."""
        return threading.get_ident() == self._thread

    def drain(self) -> None:
        """Wait until all that was asked for is read; its own thread can't."""
        if self._last is not None and not self.is_current:
            self._last.result()

    def close(self) -> None:
        """End the thread, after what it was asked for; the next read starts another."""
        threads, self._threads = self._threads, None
        if threads is not None:
            # A garbage collection may run on the reader's thread, which can't wait for itself.
            threads.shutdown(wait=not self.is_current)

    def forget_thread(self) -> None:
        """In a forked process: the thread is the parent's."""
        self._threads = None

    def _on_thread(self, read: Callable[[], object]) -> Done:
        self._thread = threading.get_ident()
        return _timed(read)


def _timed(read: Callable[[], object]) -> Done:
    began_s = time.perf_counter()
    error: BaseException | None = None
    span = None
    try:
        span = read()
    except BaseException as raised:
        # It would hold what was being read.
        error = raised.with_traceback(None)
    return Done(began_s, time.perf_counter(), error, span)


# Weakly: whoever drops a model must not keep its reader, nor the thread of that. A list of its
# references is made in one go, whatever other threads page meanwhile.
_readers: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()


def _each(action: Callable[[Reader], None]) -> Callable[[], None]:
    def act() -> None:
        for reference in _readers.valuerefs():
            if (reader := reference()) is not None:
                action(reader)

    return act


# A forked process has the memory of a read that was under way, but no thread to end it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_each(Reader.drain), after_in_child=_each(Reader.forget_thread))


class FileLink(Link):
    """A link whose sources lie in files.

    Args:
        device: the device, with its index, or the CPU.
        reader: the thread to read files on.
        largest_bytes: the most that is copied at once.
    """

    def __init__(self, device: torch.device, reader: Reader, largest_bytes: int) -> None:
        super().__init__(device, _Host() if device.type == "cpu" else None)
        self._reader = reader
        self._slot_bytes = max(1, min(_SLOT_BYTES, largest_bytes))
        self._pinning = None if device.type == "cpu" else Pinning(device)
        # Only the reader's thread takes one, and puts it back with the event of the copy from it.
        self._slots: deque[tuple[Tensor, Any]] = deque()
        if self._pinning is not None:
            try:
                self._slots += [(self._slot(self._pinning), None) for _ in range(_N_SLOTS)]
            except BaseException:
                self._pinning.undo()
                raise
            self.pinned_bytes = self._pinning.n_bytes
        self._staging = [slot for slot, _ in self._slots]
        self.staging_bytes = sum(slot.nbytes for slot in self._staging)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the staging memory."""
        for i, memory in enumerate(self._staging):
            yield NamedTensor(memory, f"staging[{i}]", STAGING)

    def page_in(self, pairs: list[tuple[Tensor, Any]], after: Iterable[Any]) -> FileEvent:
        """Have files read, and what is read copied, on the reader's thread."""
        n_bytes = sum(to.nbytes for to, _ in pairs)
        read = self._reader.submit(partial(self._copy, pairs, list(after)))
        ready = FileEvent(read, 1)
        self.meter.note_copy((FileEvent(read, 0), ready), n_bytes)
        return ready

    def check(self, event: Any) -> None:
        """Wait until a read is over; an event of the device itself is fine.

        Raises:
            PagingError: it failed.
        """
        if isinstance(event, FileEvent):
            event.check()

    def finish(self) -> None:
        """Stop the host until nothing is read or copied."""
        self._reader.drain()
        super().finish()

    def close(self) -> None:
        """Unpin and free the staging memory: the handle may be kept for long."""
        if self._pinning is not None:
            self._pinning.undo()
        self._slots.clear()
        self._staging.clear()

    def let_wait(self, stream: Any, event: Any) -> None:
        """Wait until a read is over, and let a stream wait for the copies from it.

        Raises:
            PagingError: it failed.
        """
        # Synchronization strategy: the host waits for the read, because until then there is no
        # event on the device; and where it computes itself, it is the only stream.
        self.check(event)
        stream.wait_event(event.inner if isinstance(event, FileEvent) else event)

    def _copy_out(self, to: Tensor, source: Tensor) -> None:
        """Copy at once: the thread that reads the host knows no events of the device."""
        # Synchronization strategy: `cpu()` stops the host until this stream has it, because the
        # reader may read these bytes next, and can wait for no event of a device.
        new = source.cpu()
        # Equal bytes are left alone: a page of a file stays one.
        if not torch.equal(_bits_of(to), _bits_of(new)):
            to.copy_(new)

    def _slot(self, pinning: Pinning) -> Tensor:
        def make() -> Tensor:
            return torch.frombuffer(pinning.memory(self._slot_bytes), dtype=torch.uint8)

        return taken(make, STAGING)

    def _copy(self, pairs: _Pairs, after: list[Any]) -> Span:
        """Read, and launch the copies of what is read; on the reader's thread."""
        # To wait for an event here would break a graph that another thread captures.
        while self._slots and captures_somewhere(self.device):
            time.sleep(_CAPTURE_S)
        # Synchronization strategy: the destinations may still be read by kernels.
        for event in after:
            self._in.wait_event(event)
        begin = self.mark(self._in, timed=True)
        # Each let go when it is read: a failed read may be kept, and would keep its unit's memory.
        while pairs:
            to, source = pairs.pop(0)
            if not self._slots:
                source.read_into(to)
                continue
            for low in range(0, to.nbytes, self._slot_bytes):
                high = min(low + self._slot_bytes, to.nbytes)
                self._copy_piece(to[low:high], source[low:high])
        return begin, self.mark(self._in, timed=True)

    def _copy_piece(self, to: Tensor, source: Any) -> None:
        slot, copied = self._slots.popleft()
        try:
            if copied is not None:
                # Synchronization strategy: the copy from a slot reads it on the device's own time;
                # read into before that is over, it would bring the bytes of the next piece.
                self.let_host(copied)
            source.read_into(slot[: to.nbytes])
            with aside(), self._on(self._in):
                to.copy_(slot[: to.nbytes], non_blocking=True)
        finally:
            self._slots.append((slot, self.mark(self._in)))


class FileEvent:
    """The begin or the end of a read, and of the copies to a device that follow it.

    Args:
        read: the read.
        at: 0 for its begin, 1 for its end.
    """

    __slots__ = ("_at", "_read")

    def __init__(self, read: Future[Done], at: int) -> None:
        self._read, self._at = read, at

    @property
    def inner(self) -> Any:
        """The device's own event; the host waits for the read. None if that failed."""
        span = self._read.result().span
        return None if span is None else span[self._at]

    def query(self) -> bool:
        """Return whether it has happened."""
        return self._read.done() and (self.inner is None or bool(self.inner.query()))

    def synchronize(self) -> None:
        """Wait for it, whether the read failed or not."""
        if self.inner is not None:
            self.inner.synchronize()

    def check(self) -> None:
        """Wait for the read.

        Raises:
            PagingError: it failed.
        """
        error = self._read.result().error
        if error is not None:
            # A copy: the error itself stays in its result, and would hold the frames of all that it
            # was raised to: the paged model among them, which then never went.
            raise copy(error) from error.__cause__

    def elapsed_time(self, end: FileEvent) -> float:
        """Milliseconds of the read, or of the copies if those took longer."""
        done = self._read.result()
        copy_ms = float(self.inner.elapsed_time(end.inner)) if self.inner is not None else 0.0
        return max(copy_ms, (done.ended_s - done.began_s) * 1e3)


class _Host:
    """The CPU as a device that has one stream, itself: what it was asked for before is over."""

    stream_id = 0

    def Stream(self, device: torch.device) -> _Host:
        return self

    def Event(self, enable_timing: bool = False) -> _FileMoment:
        return _FileMoment()

    def current_stream(self, device: torch.device) -> _Host:
        return self

    def wait_event(self, event: object) -> None:
        return None

    def synchronize(self, device: torch.device) -> None:
        return None

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, stream: _Host) -> AbstractContextManager[None]:
        return nullcontext()


class _FileMoment:
    """A moment of the host's that is past."""

    at_s = 0.0

    def record(self, stream: _Host) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: _FileMoment) -> float:
        return (end.at_s - self.at_s) * 1e3


def _bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
