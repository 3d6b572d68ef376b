"""When a unit comes to the device and when it goes, and who waits for whom.

Invariant: a copy waits for what used its place and its source before, and computation waits for the
copy; a unit that is missing, whatever was predicted, is fetched when it is used. The host waits
only for what it reads or is about to change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tenure._cuda_blocks import CachedBlocks, taken_by
from tenure._errors import PagingError
from tenure._graph_capture import watch_captures
from tenure._registries import NamedTensor, namers
from tenure._show import progress
from tenure._torch.lending import note_while
from tenure._torch.quiet import aside, aside_with_subclasses
from tenure._torch.writes import set_version

from ._files import HostStore
from ._link import Link, PassRecord
from ._memory import Place
from ._page import Page
from ._pass import AccessOrder, Pass
from ._room import Room
from ._tensors import HostTensor, Unit


class Engine:
    """The pages of a model on one device.

    Args:
        link: the streams of the device.
        store: the host bytes.
        units: all units of the plan; what else refers to them does so weakly.
        max_ahead: how many units may be fetched ahead; None for as many as fit.

    Attributes:
        trains: whether weights change between passes, and gradients go home.
        device: where the pages are.
        staging_bytes: host memory between files and the device.
        access_order: what passes use.
        meter: what was moved.
        room: where the pages are.
        units: as above.
        closed: whether all memory is given back.
    """

    trains = False

    def __init__(
        self, link: Link, store: HostStore, units: list[Unit], max_ahead: int | None = None
    ) -> None:
        self.access_order = AccessOrder()
        self.device, self.meter, self.staging_bytes = link.device, link.meter, link.staging_bytes
        self.room = Room(link, in_graphs=not self.trains)
        self._link, self._store, self._max_ahead = link, store, max_ahead
        # The pass that runs, or the last one: what follows it is fetched as soon as it has ended.
        self._now = Pass(self.access_order)
        # The last copy to the device of each unit; until then, the host must not change its bytes.
        self._copied: dict[Unit, object] = {}
        # The copies of units to the host, until the host has waited: it reads what it likes.
        self._unread: list[object] = []
        # Units whose pages hold, in this pass, what is on the host. To compare all tensors of a
        # unit for each module in it would take the square of their number.
        self._fresh: set[Unit] = set()
        # Whether nothing has happened since the last prefetch that could lead to another one.
        self._is_settled = False
        self.units = units
        self.closed = False
        self._model: weakref.ref[nn.Module] | None = None
        self._end_noting = note_while(self)
        self._end_watching_captures = watch_captures(link.device, self)

    @property
    def taken(self) -> CachedBlocks:
        """What it takes of the device now."""
        return taken_by(self.room.slab_sizes, self.device)

    @property
    def host_bytes(self) -> int:
        """Host memory that holds the weights."""
        return self._store.host_bytes

    @property
    def pinned_bytes(self) -> int:
        """How much of it, and of what is between files and the device, is pinned."""
        return self._store.pinned_bytes + self._link.pinned_bytes

    def adopt(self, units: list[Unit]) -> None:
        """Take the host's bytes of units.

        Raises:
            PagingError: files can't be written; the model's tensors are where they were.
        """
        self._store.adopt(units)

    def fill_residents(self, reserved: dict[Unit, Place]) -> None:
        """Fill the memory of units that stay.

        Raises:
            PagingError: a file that holds them can't be read.
        """
        n_bytes = sum(unit.n_bytes for unit in reserved)
        with progress("copying weights", n_bytes, in_bytes=True) as done:
            for unit, place in reserved.items():
                # As for the ring, each of the copies waits for what the current stream may still do
                # with memory that it had before.
                self._fetch(Page(unit, place.memory, 0, place), [self.room.mark_new()])
                done(unit.n_bytes)
        for page in self.room.pages.values():
            self._link.check(page.ready)

    def begin(self, now: Pass) -> None:
        """Begin a pass on the current stream."""
        self.room.take_back()
        self.room.lease.begin()
        self._now = now
        self.room.moved.clear()
        now.begin()
        self._fresh.clear()
        self._is_settled = False
        self.meter.begin(self._link.mark(self._link.current(), timed=True))

    def end(self) -> None:
        """End a pass, and fetch the units that follow it."""
        self.meter.end(self._link.mark(self._link.current(), timed=True))
        self.room.lease.end()
        self._is_settled = False
        self.prefetch()

    def measured(self) -> PassRecord | None:
        """Return the last pass that ended, when all of it is over: stops the host until then.

        A stream beside that of the pass may go on after it; torch reads no time between events that
        have not both happened.
        """
        record = self.meter.last
        if record is not None and record.span is not None:
            for span in (record.span, *record.copies, *record.stalls):
                for event in span:
                    self._link.let_host(event)
        return record

    def hidden_bytes(self, *, may_wait: bool) -> float | None:
        """Return the bytes that the link copies while a pass computes; None if not known yet.

        Args:
            may_wait: whether the host may be stopped until the last pass is over.
        """
        record = self.meter.last
        if record is None or not record.copied_bytes:
            return None
        if may_wait:
            self.measured()
        elif not all(self._link.is_past(event) for event in record.ends()):
            return None
        return record.compute_s * record.link_bytes_per_s

    def acquire_all(self, units: list[Unit]) -> Iterator[Page]:
        """Have several units on the device at the same time, each as by ``acquire``."""
        self.room.make_way(units, self._now)
        yield from map(self.acquire, units)

    def acquire(self, unit: Unit) -> Page:
        """Have a unit on the device, for the current stream to read, until it is released.

        Raises:
            PagingError: what is in use leaves no room for it, or its file can't be read.
        """
        page = self.room.pages.get(unit)
        if page is None or not page.users:
            self.room.lease.look(goes_on=self._now.goes_on(unit))
            page = self.room.pages.get(unit)
        was_fetched = page is not None
        if (page is None or not page.users) and self._now.note(unit):
            self._is_settled = False
        if page is None:
            self._is_settled = False
            self.meter.now.faults += 1
            page = self._fetch(*self.room.at_once(unit, self._now))
        self.refresh(page)
        self._let_compute(page, may_retry=was_fetched)
        page.users += 1
        self.room.idle.discard(page)
        return page

    def refresh(self, page: Page) -> None:
        """Copy a page anew if it has changed on the host, once a pass."""
        if page.unit not in self._fresh:
            if page.stale():
                self._refresh(page)
            self._fresh.add(page.unit)

    def shown(self, page: Page, host: HostTensor) -> Tensor:
        """Return the tensor that stands for a host tensor, on a page that is in use."""
        # Written in the middle of a pass, as by a hook.
        if page.is_stale(host):
            self._refresh(page)
            self._let_compute(page)
        return page.shown(host)

    def stays(self, unit: Unit) -> bool:
        """Return whether a unit stays on the device."""
        page = self.room.pages.get(unit)
        return page is not None and page.is_resident

    def page_in_use(self, unit: Unit) -> Page | None:
        """Return the page of an acquired unit, for the current stream to read as well."""
        page = self.room.pages.get(unit)
        if page is None or not page.users:
            return None
        # A forward may run part of itself on a stream of its own, which has not waited yet.
        self._let_compute(page)
        return page

    def release(self, page: Page) -> None:
        """End one use of a page: what was written to it goes back to the host."""
        page.users -= 1
        if page.users:
            return
        page.last_use = None
        self._save(page)
        if page.is_resident:
            if self.trains and not page.is_held():
                # The next copy to it need not wait for all that is launched until then.
                page.last_use = self.room.marks_of(page)
            return
        self.room.idle.add(page)
        # The next module of the unit comes at once.
        if self._now.expects(page.unit):
            return
        self._is_settled = False
        # Of a page that something still holds, the last use is yet to come: it is marked when
        # the page is dropped. See holds_what_it_has_read in test_races.
        if page.unit in self.room.idle.free():
            page.last_use = self.room.marks_of(page)

    def save(self) -> None:
        """Stop the host until what was written so far to units in use is there."""
        for page in [page for page in self.room.pages.values() if page.users]:
            self._save(page)
        self._let_host_look()

    def prefetch(self) -> None:
        """Let go of pages that are not wanted soon, and fetch those that are."""
        # Without a ring no page comes or goes, except one whose place waits for it.
        if not (self.trains or self.room.ring_bytes or self.room.expected):
            return
        was_settled, self._is_settled = self._is_settled, True
        if was_settled and not self.room.idle.has_held:
            return
        # In the first pass nobody knows what comes: what is here may be that.
        if next(self._now.upcoming(), None) is None:
            return
        wanted = self._wanted()
        for page in list(self.room.idle.free().values()):
            if page.unit not in wanted:
                self.room.drop(page)
        ahead: Iterable[Unit] = wanted
        if self.trains:
            # Residents, too, which change; but nothing after the pass: an optimizer is to write it.
            until = None if self._now.records else self._now.n_left
            ahead = dict.fromkeys(islice(self._now.upcoming(), until))
        for unit in ahead:
            here = self.room.pages.get(unit)
            if here is not None:
                if self.trains and not here.users:
                    self.refresh(here)
                continue
            found = self.room.free_page(unit) if unit in wanted else None
            # Not the next one that fits: it would take the place of one that is needed before.
            if found is None:
                return
            self._fetch(*found)

    def let_host_write(self, host: HostTensor) -> None:
        """Stop the host until no copy reads a tensor; it counts as changed from now on."""
        for each in host.parts or [host]:
            each.is_aliased = True
            if each.unit is not None:
                self._wait_for_copies(each.unit)

    def set_host(self, host: HostTensor, values: Tensor) -> None:
        """Give a host tensor other values; all that was written back before must be there."""
        self.let_host_write(host)
        with aside_with_subclasses():
            writable(host.tensor).copy_(values)

    def serve(self, model: nn.Module) -> None:
        """Be named in reports of memory as the model's, from now until it is closed."""
        self._model = weakref.ref(model)
        namers.add(self)

    def served_model(self) -> nn.Module | None:
        """See `TensorNamer`."""
        return None if self._model is None else self._model()

    def close(self) -> None:
        """Stop the host until nothing is under way; then let go of all memory, once."""
        if self.closed:
            return
        self.closed = True
        namers.discard(self)
        self._end_noting()
        self.room.lease.close()
        # Synchronization strategy: copies to the host must arrive, and nothing may read the memory
        # when others get it; whatever the model did is over then, on all streams.
        self._link.finish()
        self._link.close()
        self.room.close()
        self._end_watching_captures()
        self._store.close()

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the ring, each unit that stays, what the link stages, and the host's memory."""
        for keeper in (self.room, self._link, self._store):
            yield from keeper.named_tensors()

    def _save(self, page: Page) -> None:
        """Write what was written to a page back to the host."""
        self.room.moved += page.forget_moved()
        changed = page.written(with_buffers=self._now.saves_buffers)
        if changed:
            self._write_back(page, changed)
        page.note_saved(changed)

    def _fetch(self, page: Page, after: list[object]) -> Page:
        """Fill a page, after these events, and only then count it among those that are here."""
        self._fill(page, after)
        self._fresh.add(page.unit)
        self.room.note_here(page)
        return page

    def _wanted(self) -> dict[Unit, None]:
        """Return the units that come next, as many as the ring can hold beside those in use."""
        pages, idle = self.room.pages, self.room.idle.free()
        room_bytes = self.room.free_bytes + sum(unit.n_bytes for unit in idle)
        wanted: dict[Unit, None] = {}
        for unit in self._now.upcoming():
            if unit in wanted or (unit in pages and unit not in idle):
                continue
            # A place of its own takes nothing of the ring.
            room_bytes -= 0 if unit in self.room.expected else unit.n_bytes
            if room_bytes < 0 or len(wanted) == self._max_ahead:
                break
            wanted[unit] = None
        return wanted

    def _fill(self, page: Page, after: list[object]) -> None:
        """Copy a unit to its page, after these events."""
        unit = page.unit
        with aside():
            pair = page.bytes_of(0, unit.n_bytes), self._host_bytes(unit)
        page.note_copied()
        page.ready = self._copy_in(unit, [pair], after)

    def _let_host_look(self) -> None:
        """Stop the host until what was written back is there."""
        # Synchronization strategy: the link writes to memory that any code of the user's may read
        # next, a state dict or a print; unawaited, that would be the values of the pass before.
        for written in self._unread:
            self._link.let_host(written)

    def let_host_read(self) -> None:
        """Stop the host until what was written back is there, and forget those copies."""
        self._let_host_look()
        self._unread.clear()
        self.room.written.clear()

    def _wait_for_copies(self, unit: Unit) -> None:
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

    def _refresh(self, page: Page) -> None:
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
        after = self.room.marks_of(page) if page.users else self.room.uses_of(page)
        try:
            page.ready = self._copy_in(page.unit, pairs, after)
        except BaseException:
            # An interruption, too: what was noted was not copied.
            page.forget_copied()
            raise
        page.waited.clear()

    def _write_back(self, page: Page, changed: list[HostTensor]) -> None:
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
            event = self._link.page_out(pairs, self.room.marks_of(page))
        for host, version in zip(changed, versions, strict=True):
            set_version(host.tensor, version)
        self.room.written[page.unit] = event
        self._unread.append(event)
        page.ready = event
        page.waited.clear()

    def _let_compute(self, page: Page, *, may_retry: bool = False) -> None:
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
                self._refresh(page)
                return self._let_compute(page)
            page.waited.add(stream.stream_id)
        page.streams[stream.stream_id] = stream

    def _host_bytes(self, unit: Unit) -> Any:
        if any(host.has_left for host in unit.tensors):
            # Before it is brought back to where copies read, or what copies write is moved.
            self._wait_for_copies(unit)
            self._let_host_look()
        return self._store.bytes_of(unit)

    def _copy_in(self, unit: Unit, pairs: list[tuple[Tensor, Tensor]], after: list[object]) -> Any:
        # Synchronization strategy: the unit was written on the device, dropped, and is back before
        # its values have reached the host: the copy would read those from before it was written.
        if unit in self.room.written:
            after = [*after, self.room.written.pop(unit)]
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
