"""What happens to storages, moment by moment, as operations and finalizers tell of it.

A step ends when an operation has made storages. It has two moments: when its level was highest,
temporaries of operations included, and its end. Torch's own events of the host's allocator tell
that, in which each step leaves a mark. They are read after some dozens of steps, and never within a
backward pass, whose session is a copy.

Invariants: no storage is kept alive; what a storage was, where it was made and for how long it
lived is told to the columns of its device once, when its death is read; while another profiler has
this thread, the level at the end of each step stands for the highest within it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._storages import is_hollow
from tenure._torch import allocations
from tenure._torch import cpu_allocator as allocator
from tenure._torch.autograd import is_running_node
from tenure._torch.modes import has_function_modes
from tenure._torch.profilers import announce
from tenure._torch.quiet import without_functions
from tenure._torch.resizing import tell, tell_no_more
from tenure._torch.storages import key_of

from .._trace import BlockSizes, the_trace
from ._accounts import Account, Entry
from ._bands import OUTSIDE, Bands
from ._categories import UNKNOWN, Outliving
from ._events import (
    EventSession,
    WrappedNumbers,
    end_of,
    gone_before,
    highest,
    made_later,
    peak_of,
    place_of,
)
from ._lives import FOREVER
from ._operations import ADOPTS, COPIES, RESIZES, Failed, storages_in
from ._places import BEFORE, NOWHERE, Places

_STEPS_PER_READING = 100
_STRIDED = torch.strided
Sample = Callable[[int, int], int]
"""Called with the time and the level of the host; returns when it wants to be called again."""


# A plain tuple, and no class of one, which takes six times as long to make: the number of the
# step, the host's level, the time, what was made, what died before that, the numbers that torch
# wrapped a second time, and what autograd would have added to in place without the mode.
_Step = tuple[int, int, int, list[Entry], list[Entry], list[int], Entry | None]


class Recorder:
    """Notes what the operations of one thread make, and when it dies.

    Args:
        places: where things are made.
        sample: called now and then, between operations.
        failed: called with the error of an operation, whose frames are alive.

    Attributes:
        accounts: what is known of each device.
        bands: the scopes that things are made in.
        host: the account of the host.
        outliving: what is known of storages that outlive steps of an optimizer.
        is_open: whether it takes notes.
        n_events: storages that were made, and that died.
        began_ns: when it was started, by ``time.perf_counter_ns()``.
    """

    def __init__(self, places: Places, sample: Sample, failed: Failed) -> None:
        self.outliving = Outliving()
        self.host = Account(torch.device("cpu"), self.outliving)
        self.accounts = {self.host.device: self.host}
        self.is_open = False
        self.n_events = 0
        self.began_ns = 0
        self._places, self._sample, self.failed = places, sample, failed
        self.bands = Bands(self.step)
        self._next_sample_ns = 0
        self._entries: dict[int, Entry] = {}
        self._numbers = itertools.count()
        self._steps: list[_Step] = []
        self._dead: list[Entry] = []
        self._remade: list[Entry] = []
        self._wrapped: list[int] = []
        self._summed: Entry | None = None
        # marks are numbered from the last reading on: small numbers are ready-made
        self._first = 0
        self._thread = get_ident()
        self._live = allocator.live_counter()
        self._session = EventSession()
        self._sizes = BlockSizes()
        self._host_base = self._host_last = self._last_ns = 0
        self._tolerated = 0
        self._stop_announcing: Callable[[], None] | None = None

    @property
    def missed(self) -> set[str]:
        """Why temporaries of some operations were not seen."""
        return self._session.missed

    # --- from the beginning to the end

    def open(self) -> None:
        """Begin; what is alive already is told by ``know`` next, and then it starts."""
        self._sizes.keep_all()
        self._stop_announcing = announce(self._make_way)
        the_trace.sessions.guests.append(self._make_way)
        self._session.begin()
        tell(self.resized)

    def know(self, storage: UntypedStorage, category: int) -> None:
        """Note a storage that was there before the start, and what it counts as."""
        if key_of(storage) not in self._entries:
            entry = self._enter(storage, BEFORE, OUTSIDE, ADOPTS)
            if entry is not None:
                entry.category, entry.begin = category, 0
                entry.in_backward = entry.is_input = False

    def learn(self, storage: UntypedStorage, category: int, *, after_step: bool) -> None:
        """Note what a storage counts as, if it is known."""
        entry = self._entries.get(key_of(storage))
        if entry is None:
            return
        if category != UNKNOWN:
            entry.category = category
        if after_step:
            self.outliving.saw(entry.place, entry.asked_bytes, category)

    def stepped(self) -> None:
        """An optimizer has made a step."""
        self.step()
        self.outliving.step(end_of(self._steps[-1][0] if self._steps else self._first - 1))

    def start(self) -> None:
        """All that was alive is known: what follows is the program's doing."""
        self.began_ns = time.perf_counter_ns()
        self.is_open = True
        self.bands.open(self.began_ns)
        self._host_base = self.host.known_bytes - self._live.value
        self._host_last = self.host.known_bytes
        for account in self.accounts.values():
            account.begin()
        self._look([])

    def close(self) -> None:
        """Tell what is still to be told, and leave torch as it was."""
        if self.is_open:
            self._look([])
            self._tell(self._session.end())
            self.is_open = False
            number, at_ns = next(self._numbers), self.elapsed_ns()
            for account in self.accounts.values():
                account.look(end_of(number), at_ns, is_last=True)
            for entry in list(self._entries.values()):
                entry.account.tell(entry, FOREVER)
        self._session.end()
        tell_no_more(self.resized)
        self.bands.close()
        if self._stop_announcing is not None:
            the_trace.sessions.guests[:] = [
                each for each in the_trace.sessions.guests if each != self._make_way
            ]
            self._stop_announcing()
            self._stop_announcing = None
        # other listeners have theirs
        if not the_trace.sessions.listeners:
            self._sizes.keep_none()
        self._entries.clear()

    def abandon(self) -> None:
        """Take no more notes, at the end of the interpreter and in a forked child."""
        self.is_open = False
        self._session.end()

    # --- told by the mode

    def made(self, out: Any, args: tuple[Any, ...], kind: int, caller: Any) -> None:
        """See `Told`."""
        if has_function_modes():
            with without_functions():
                self._note(out, args, kind, caller)
        else:
            self._note(out, args, kind, caller)

    def wraps(self, numbers: list[int]) -> None:
        """See `Told`."""
        self._wrapped += numbers

    def sums(self, first: UntypedStorage, total: UntypedStorage) -> None:
        """See `Told`."""
        entry = self._entries.get(key_of(first))
        if entry is not None and entry.asked_bytes == total.nbytes():
            self._forget(entry)
            self._summed = entry

    # --- what was made

    def _note(self, out: Any, args: tuple[Any, ...], kind: int, caller: Any) -> None:
        # nearly all give back one plain tensor of the host, which nobody knows yet
        if type(out) is Tensor and out.is_cpu and out.layout is _STRIDED:
            storages = [out.untyped_storage()]
        elif isinstance(out, Tensor | list | tuple | dict):
            storages = storages_in(out)
        else:
            return
        known, made, place = self._entries, [], -1
        for storage in storages:
            before = known.get(key_of(storage))
            if before is not None:
                if kind != RESIZES or before.asked_bytes == storage.nbytes():
                    continue
                self._end_life(before)
            if place < 0:
                place = self._places.of(caller)
            entry = self._enter(storage, place, self.bands.current(), kind)
            if entry is not None:
                made.append(entry)
                if before is not None:
                    entry.category = before.category
                if kind == COPIES and self._is_input(args):
                    entry.is_input = True
        # The allocator has more than is known: compiled code, or another thread, has made it, and
        # may have given it to this operation.
        if self._unknown_bytes() > self._tolerated:
            made += self._adopted(args)
        if made:
            self._look(made)

    def resized(self, storage: UntypedStorage, n_bytes: int) -> None:
        """A storage is about to have another size, by no operation: `storage.resize_()`."""
        before = self._entries.get(key_of(storage))
        if not self.is_open or (before is not None and before.asked_bytes == n_bytes):
            return
        if before is not None:
            self._end_life(before)
        place = self._places.of(sys._getframe(1))
        entry = self._enter(storage, place, self.bands.current(), RESIZES, n_bytes)
        if entry is not None:
            entry.category = UNKNOWN if before is None else before.category
            self._remade.append(entry)

    def _end_life(self, entry: Entry) -> None:
        """End the life that a storage had with a size; it goes on with another."""
        self._forget(entry)
        self._dead.append(entry)

    def _adopted(self, args: tuple[Any, ...]) -> list[Entry]:
        made = []
        for storage in storages_in(args):
            if key_of(storage) not in self._entries:
                entry = self._enter(storage, NOWHERE, self.bands.current(), ADOPTS)
                if entry is not None:
                    entry.is_input = False
                    made.append(entry)
        self._tolerated = self._unknown_bytes()
        return made

    def _unknown_bytes(self) -> int:
        """What the host's allocator has beside the storages that are known."""
        in_use_bytes: int = self._host_base + self._live.value
        return in_use_bytes - self.host.known_bytes - self._summed_host_bytes()

    def _summed_host_bytes(self) -> int:
        summed = self._summed
        return 0 if summed is None or summed.account is not self.host else summed.asked_bytes

    def _is_input(self, args: tuple[Any, ...]) -> bool:
        entries = (self._entries.get(key_of(storage)) for storage in storages_in(args))
        return any(entry is not None and entry.is_input for entry in entries)

    def _enter(
        self, storage: UntypedStorage, place: int, scope: int, kind: int, n_bytes: int = -1
    ) -> Entry | None:
        """Note a storage; None for one that takes nothing."""
        if n_bytes < 0:
            n_bytes = storage.nbytes()
        device = storage.device
        if not n_bytes or device.type == "meta":
            return None
        account = self.accounts.get(device) or self._account(device)
        entry = Entry(storage, self._died)
        entry.key, entry.account, entry.place, entry.scope = key_of(storage), account, place, scope
        entry.n_bytes = entry.asked_bytes = n_bytes
        entry.category, entry.begin = UNKNOWN, -1
        entry.in_backward = is_running_node()
        entry.is_input = kind == ADOPTS or self._places.are_inputs[place]
        # memory of numpy's, of a file, or that another process shares is not the allocator's
        entry.is_foreign = kind == ADOPTS and (is_hollow(storage) or not storage.resizable())
        self._entries[entry.key] = entry
        account.came(entry)
        return entry

    def _account(self, device: torch.device) -> Account:
        account = self.accounts[device] = Account(device, self.outliving)
        if self.is_open:
            account.begin()
        return account

    def _died(self, reference: Any) -> None:
        """The finalizer of a storage: on any thread, and in the midst of anything."""
        # What is done here is done at each death: the rest when the next step is read.
        entry: Any = self._entries.get(reference.key)
        if entry is reference:
            self._forget(entry)
            self._dead.append(entry)

    def _forget(self, entry: Any) -> None:
        del self._entries[entry.key]
        entry.account.went(entry)
        entry.went_in_backward = is_running_node()

    # --- steps

    def step(self) -> None:
        """End a step in which nothing was made."""
        if self.is_open:
            self._look([])

    def _look(self, made: list[Entry]) -> None:
        """Put down a step, and leave its mark among the allocator's events."""
        number = next(self._numbers)
        at_ns = self.elapsed_ns()
        # Taken before the step is put down: what dies from here on belongs to the next one.
        dead, self._dead = self._dead, []
        if self._remade:
            made, self._remade = made + self._remade, []
        wrapped = self._wrapped
        if wrapped:
            self._wrapped = []
        level_bytes = self._live.value - self._summed_host_bytes()
        summed, self._summed = self._summed, None
        self._steps.append((number, level_bytes, at_ns, made, dead, wrapped, summed))
        is_ours = get_ident() == self._thread
        mark = self._session.mark
        if mark is not None and is_ours:
            mark(number - self._first)
        if len(self.accounts) > 1:
            for account in {id(entry.account): entry.account for entry in made}.values():
                account.look(end_of(number), at_ns)
        if len(self._steps) >= _STEPS_PER_READING and is_ours and not is_running_node():
            self.read()
        if at_ns >= self._next_sample_ns:
            self._next_sample_ns = self._sample(at_ns, self._host_base + self._live.value)

    def elapsed_ns(self) -> int:
        """Since it was started."""
        return time.perf_counter_ns() - self.began_ns

    def read(self) -> None:
        """Tell the columns what has happened up to now."""
        self._tell(self._session.read())
        self._sizes.keep_needed(True, self._session.mark is not None)
        self._session.begin()

    def _tell(self, events: list[int] | None) -> None:
        steps, self._steps = self._steps, []
        first, start, is_known = self._first, 0, allocator.is_known()
        wrapped = WrappedNumbers()
        series, base_bytes = self.host.series, self._host_base
        for number, host_bytes, at_ns, made, dead, numbers, summed in steps:
            part: list[int] = []
            if events is not None:
                end = place_of(events, allocations.as_event(number - first), start)
                # where a mark is missing, what came before it is told with the next
                if end is not None:
                    part, start = events[start:end], end + 1
                    if summed is not None and summed.account is self.host:
                        wrapped.take_sum_out(part, summed.asked_bytes)
                    if numbers or wrapped.are_open:
                        part = wrapped.taken_out(part, numbers)
            level = base_bytes + host_bytes if is_known else self._host_last + sum(part)
            self._host_last = level
            self.n_events += len(made) + len(dead)
            if len(part) < 2:
                high, place = level, 0
            else:
                high, place = highest(part, level)
            if high != level:
                series.add(peak_of(number), (self._last_ns + at_ns) // 2, high)
            series.add(end_of(number), at_ns, level)
            self._last_ns = at_ns
            for entry in made:
                entry.begin = peak_of(number)
            gone = dead
            # At the end all is there that was made, and nothing that died; at a peak before that
            # not yet.
            if place < len(part) - 1:
                for entry in made_later(made, part, place):
                    entry.begin = end_of(number)
                gone, still_there = gone_before(dead, part, place)
                for entry in still_there:
                    entry.account.tell(entry, end_of(number))
            for entry in gone if summed is None else [*gone, summed]:
                entry.account.tell(entry, peak_of(number))
        if steps:
            self._first = steps[-1][0] + 1
        self.outliving.forget()

    def _make_way(self) -> None:
        """Another profiler is about to begin on this thread."""
        if self._session.mark is not None and get_ident() == self._thread:
            self._look([])
            self._tell(self._session.end())
            self._session.missed.add("another profiler had its thread")
