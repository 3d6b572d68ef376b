"""The link from files to a device: read on a thread into staging memory, copied on from there.

Invariant: the reading thread never speaks to the device. Pieces are read and copied in the order of
asking; a piece of staging memory is read into again only after the copy from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from tenure._account import taken
from tenure._registries import NamedTensor
from tenure._torch.quiet import aside

from .._host import Done, Pinning, Reader, raise_anew
from ._link import Link, copy_if_other

STAGING = "paged: staging"
"""What reports of memory call the host memory between files and a device."""
_N_SLOTS = 4
_SLOT_BYTES = 16 * 2**20


class DiskLink(Link):
    """A link whose sources lie in files.

    Args:
        device: the device, with its index.
        reader: the thread to read files on.
        largest_bytes: the most that is copied at once.
        slot_bytes: the most that is read at once; as much is staged a few times.
    """

    def __init__(
        self,
        device: torch.device,
        reader: Reader,
        largest_bytes: int,
        slot_bytes: int = _SLOT_BYTES,
    ) -> None:
        super().__init__(device)
        self._reader = reader
        # A thread outside of the model may wait for a copy, too.
        self._lock = RLock()
        self._slot_bytes = max(1, min(slot_bytes, largest_bytes))
        self._pinning = Pinning(device)
        self._slots = self._new_slots()
        self._free = list(self._slots)
        self._busy: deque[tuple[Tensor, Any]] = deque()
        self._waiting: deque[_Piece] = deque()
        self._reading: deque[_Reading] = deque()

    @property
    def staging_bytes(self) -> int:
        """Host memory between files and the device."""
        return _N_SLOTS * self._slot_bytes

    @property
    def pinned_bytes(self) -> int:
        """How much of it is pinned."""
        return self._pinning.n_bytes

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The staging memory."""
        for i, memory in enumerate(self._slots):
            yield NamedTensor(memory, f"staging[{i}]", STAGING)

    def page_in(
        self, pairs: Iterable[tuple[Tensor, Any]], after: Iterable[Any]
    ) -> tuple[TransferEvent, TransferEvent]:
        """Have files read, and what is read copied when the link is next asked something."""
        transfer = _Transfer(list(after))
        pieces = [piece for to, source in pairs for piece in self._pieces(to, source, transfer)]
        transfer.n_left = len(pieces)
        with self._lock:
            self._waiting += pieces
            self._move_on()
        return TransferEvent(self, transfer, is_begin=True), TransferEvent(self, transfer)

    def page_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """Copy at once: the thread that reads the host knows no events of the device."""
        for event in after:
            self._out.wait_event(event)
        with self._on(self._out):
            for to, source in pairs:
                # Synchronization strategy: `cpu()` stops the host until this stream has it, because
                # the reader may read these bytes next, and can wait for no event of a device.
                copy_if_other(to, source.cpu())
        return self.mark(self._out)

    def check(self, event: Any) -> None:
        """Have a transfer launched; an event of the device itself is fine.

        Raises:
            PagingError: its file could not be read.
        """
        if isinstance(event, TransferEvent):
            event.check()

    def _let_wait(self, stream: Any, event: Any) -> None:
        """Have a transfer launched, and let a stream wait for it.

        Raises:
            PagingError: its file could not be read.
        """
        self.check(event)
        stream.wait_event(event.inner if isinstance(event, TransferEvent) else event)
        with self._lock:
            self._move_on()

    def launch(self, transfer: _Transfer) -> None:
        """Stop the host until a transfer is read, and its copies are launched."""
        with self._lock:
            while transfer.n_left:
                self._read_on()
                if self._reading:
                    self._launch_first()
                else:
                    self._take_back_slot()

    def finish(self) -> None:
        """Stop the host until nothing is read or copied."""
        # A garbage collection on the reader's thread may close a model: that thread can't wait for
        # what it is to read itself.
        while (self._reading or self._waiting) and not self._reader.is_current:
            last = self._waiting[-1] if self._waiting else self._reading[-1].piece
            self.launch(last.transfer)
        super().finish()

    def close(self) -> None:
        """Unpin the staging memory."""
        self._pinning.undo()

    def _new_slots(self) -> list[Tensor]:
        try:
            return [self._slot() for _ in range(_N_SLOTS)]
        except BaseException:
            self._pinning.undo()
            raise

    def _slot(self) -> Tensor:
        def make() -> Tensor:
            return torch.frombuffer(self._pinning.memory(self._slot_bytes), dtype=torch.uint8)

        return taken(make, STAGING)

    def _pieces(self, to: Tensor, source: Any, transfer: _Transfer) -> Iterator[_Piece]:
        for low in range(0, to.nbytes, self._slot_bytes):
            high = min(low + self._slot_bytes, to.nbytes)
            yield _Piece(to[low:high], source[low:high], transfer)

    def _move_on(self) -> None:
        """Launch the copies of what is read, and have more read, without waiting."""
        # By whoever asks the link for something: the reading thread never speaks to the device.
        while self._reading and self._reading[0].read.done():
            self._launch_first()
        while self._busy and self.is_past(self._busy[0][1]):
            self._take_back_slot()
        self._read_on()

    def _read_on(self) -> None:
        while self._waiting and self._free:
            piece, slot = self._waiting.popleft(), self._free.pop()
            target = slot[: piece.to.nbytes]
            read = self._reader.submit(partial(piece.source.read_into, target))
            self._reading.append(_Reading(piece, slot, read))

    def _take_back_slot(self) -> None:
        # Synchronization strategy: the copy from a slot reads it on the device's own time; read
        # into before that is over, it would bring the bytes of the next piece.
        memory, event = self._busy.popleft()
        self.let_host(event)
        self._free.append(memory)

    def _launch_first(self) -> None:
        first = self._reading.popleft()
        to, transfer = first.piece.to, first.piece.transfer
        transfer.note(first.read.result())
        if transfer.begin is None:
            # Synchronization strategy: asked for here and not when the transfer was, for until its
            # file is read no copy is on the stream that could wait. As the first one waits, so do
            # those behind it.
            for event in transfer.after:
                self._in.wait_event(event)
            transfer.begin = self.mark(self._in, timed=True)
        with aside(), self._on(self._in):
            to.copy_(first.slot[: to.nbytes], non_blocking=True)
        transfer.end = self.mark(self._in, timed=True)
        self._busy.append((first.slot, transfer.end))


class _Transfer:
    """What is copied for one unit.

    Args:
        after: the events that its place is in use until.
    """

    def __init__(self, after: list[Any]) -> None:
        self.after = after
        self.n_left = 0
        self.read_s = 0.0
        self.error: BaseException | None = None
        self.begin: Any = None
        self.end: Any = None

    def note(self, done: Done) -> None:
        self.n_left -= 1
        self.read_s += done.ended_s - done.began_s
        # The first one: those behind it may only follow from it.
        self.error = self.error or done.error


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes that are to be read, and where on the device they are to go."""

    to: Tensor
    source: Any
    transfer: _Transfer


@dataclass(frozen=True, slots=True)
class _Reading:
    """A piece that is being read into staging memory."""

    piece: _Piece
    slot: Tensor
    read: Future[Done]


class TransferEvent:
    """The begin or the end of a transfer that may not be launched yet."""

    __slots__ = ("_is_begin", "_link", "_transfer")

    def __init__(self, link: DiskLink, transfer: _Transfer, *, is_begin: bool = False) -> None:
        self._link, self._transfer, self._is_begin = link, transfer, is_begin

    @property
    def inner(self) -> Any:
        """The device's own event; the host waits until it is launched."""
        self._link.launch(self._transfer)
        return self._transfer.begin if self._is_begin else self._transfer.end

    def synchronize(self) -> None:
        """Stop the host until it, whether the read failed or not."""
        self.inner.synchronize()

    def query(self) -> bool:
        """Whether it has happened; one that is not launched has not."""
        event = self._transfer.begin if self._is_begin else self._transfer.end
        return self._transfer.n_left == 0 and event is not None and bool(event.query())

    def check(self) -> None:
        """Have it launched.

        Raises:
            PagingError: the read failed.
        """
        self._link.launch(self._transfer)
        raise_anew(self._transfer.error)

    def elapsed_time(self, end: TransferEvent) -> float:
        """Milliseconds of the transfer: of the read, or of the copies where those took longer."""
        copy_ms = float(self.inner.elapsed_time(end.inner))
        return max(copy_ms, self._transfer.read_s * 1e3)
