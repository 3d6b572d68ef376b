"""What goes between the host's tensors and the device's, and who waits for what of it.

Invariant: a copy waits for what used its place and its source before, computation waits for the
copy, and the host waits only for what it reads or is about to change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenure._errors import PagingError
from tenure._torch.quiet import aside
from tenure._torch.writes import set_version

from ._files import HostStore
from ._link import Link
from ._page import Page
from ._tensors import HostTensor, Unit


class Copies:
    """The copies over one link.

    Args:
        link: the streams of the device.
        store: the host bytes.
    """

    def __init__(self, link: Link, store: HostStore) -> None:
        self._link, self._store = link, store
        # The last copy to the device of each unit; until then, the host must not change its bytes.
        self._copied: dict[Unit, object] = {}
        # The last copy of each unit to the host, until one back, or the host, has waited for it.
        self._written: dict[Unit, object] = {}
        # All of those, until the host has waited for them: it reads what it likes.
        self._unread: list[object] = []

    def fill(self, page: Page, after: list[object]) -> None:
        """Copy a unit to its page, after these events."""
        unit = page.unit
        with aside():
            pair = page.bytes_of(0, unit.n_bytes), self._host_bytes(unit)
        page.note_copied()
        page.ready = self._copy_in(unit, [pair], after)

    def let_host_look(self) -> None:
        """Stop the host until what was written back is there."""
        # Synchronization strategy: the link writes to memory that any code of the user's may read
        # next, a state dict or a print; unawaited, that would be the values of the pass before.
        for event in self._unread:
            self._link.let_host(event)

    def let_host_read(self) -> None:
        """Do the same, once for all."""
        self.let_host_look()
        self._unread.clear()
        self._written.clear()

    def wait_for_copies(self, unit: Unit) -> None:
        """Stop the host until no copy reads a unit's host bytes."""
        copied = self._copied.pop(unit, None)
        if copied is not None:
            # Synchronization strategy: the copy reads the host's bytes some time after it was
            # asked for; who changes them meanwhile would have half of the new ones on the device.
            self._link.let_host(copied)

    def wait_for_all_copies(self) -> None:
        """Stop the host until no copy reads any host bytes."""
        copied = list(self._copied.items())
        if copied:
            # Synchronization strategy: as for one unit; one stream copies, so its last one is last.
            self._link.let_host(copied[-1][1])
        for unit, event in copied:
            # A thread of autograd's may have asked for another one meanwhile.
            if self._copied.get(unit) is event:
                del self._copied[unit]

    def refresh(self, page: Page) -> None:
        """Copy anew what may have changed on the host."""
        changed = page.stale()
        with aside():
            source = self._host_bytes(page.unit)
        page.note_copied()
        with aside():
            pairs = [
                (page.bytes_of(start, end - start), source[start:end])
                for start, end in page.unit.spans_of(changed)
            ]
        # Synchronization strategy: where the page is in use the copy waits for all streams that
        # were shown it, or kernels of this pass would read values of the next.
        after = self.marks_of(page) if page.users else self.uses_of(page)
        try:
            page.ready = self._copy_in(page.unit, pairs, after)
        except BaseException:
            # An interruption, too: what was noted was not copied.
            page.forget_copied()
            raise
        page.waited.clear()

    def write_back(self, page: Page, changed: list[HostTensor]) -> None:
        """Copy tensors of a page to the host, after what the device was given so far."""
        # Synchronization strategy: the copy waits for the kernels that write, and so do the next
        # ones for the copy: `ready` is now its event, and nobody has waited for that yet.
        shown = [page.shown(host) for host in changed]
        # The copy is no write of the program's: a graph would refuse each backward pass after
        # those of batch norm, which its kernels make without a version.
        versions = [page.version_of(host) for host in changed]
        with aside():
            pairs = [
                (writable(host.tensor), tensor) for host, tensor in zip(changed, shown, strict=True)
            ]
            event = self._link.page_out(pairs, self.marks_of(page))
        for host, version in zip(changed, versions, strict=True):
            set_version(host.tensor, version)
        self._written[page.unit] = event
        self._unread.append(event)
        page.ready = event
        page.waited.clear()

    def let_compute(self, page: Page, *, may_retry: bool = False) -> None:
        """Let the current stream use a page once its copy is there.

        Args:
            page: the page.
            may_retry: whether it is copied anew where its file could not be read.

        Raises:
            PagingError: its file can't be read.
        """
        stream = self._link.current()
        # Synchronization strategy: a stream waits once for each copy, and all that it is given
        # later is after that; else a kernel would read the unit that had the place before.
        if stream.stream_id not in page.waited:
            try:
                self._link.let_compute(stream, page.ready)
            except PagingError:
                # A disk that failed when the file was read ahead may be well by now.
                page.forget_copied()
                if not may_retry:
                    raise
                self.refresh(page)
                return self.let_compute(page)
            page.waited.add(stream.stream_id)
        page.streams[stream.stream_id] = stream

    def marks_of(self, page: Page) -> list[object]:
        """Events after all that was launched so far on the streams that have used a page."""
        streams = {**page.streams, **page.recorded_streams}
        return [self._link.mark(stream) for stream in streams.values()]

    def uses_of(self, page: Page) -> list[object]:
        """Return the events after which nothing reads or writes a page that was let go."""
        uses = self.marks_of(page) if page.last_use is None else page.last_use
        written = self._written.get(page.unit)
        return uses if written is None else [*uses, written]

    def _host_bytes(self, unit: Unit) -> Any:
        if any(host.has_left for host in unit.tensors):
            # Before it is brought back to where copies read, or what copies write is moved.
            self.wait_for_copies(unit)
            self.let_host_look()
        return self._store.bytes_of(unit)

    def _copy_in(self, unit: Unit, pairs: list[tuple[Tensor, Tensor]], after: list[object]) -> Any:
        # Synchronization strategy: the unit was written on the device, dropped, and is back before
        # its values have reached the host: the copy would read those from before it was written.
        if unit in self._written:
            after = [*after, self._written.pop(unit)]
        with aside():
            event = self._link.page_in(pairs, after)
        # The last one stands last.
        self._copied.pop(unit, None)
        self._copied[unit] = event
        return event


def writable(tensor: Tensor) -> Tensor:
    """Return a tensor to write to, also for one that was made in inference mode."""
    if not tensor.is_inference():
        return tensor
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    return view.set_(storage, offset, tensor.size(), tensor.stride())
