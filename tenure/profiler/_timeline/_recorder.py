"""What happens to storages, step by step, as operations and finalizers tell of it.

A step ends when an operation has made storages. Its level is the highest within it, temporaries of
operations included: the stream of the thread tells that of the host, in which each step is a mark.

Invariants: no storage is kept alive; what a storage was, where it was made and for how long it
lived is told to the columns of its device once, when its death is read; while another profiler has
this thread, the level at the end of each step stands for the highest within it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._storages import is_hollow
from tenure._stream import process, this_stream
from tenure._torch import cpu_allocator as allocator
from tenure._torch.autograd import is_running_node
from tenure._torch.modes import has_function_modes
from tenure._torch.quiet import without_functions
from tenure._torch.resizing import tell, tell_no_more
from tenure._torch.storages import key_of

from ._accounts import Account, Entry
from ._bands import OUTSIDE, Bands
from ._categories import UNKNOWN, Outliving
from ._lives import FOREVER
from ._operations import ADOPTS, COPIES, RESIZES, Failed, storages_in
from ._places import BEFORE, NOWHERE, Places

_STRIDED = torch.strided
Sample = Callable[[int, int], int]
"""Called with the time and the level of the host; returns when it wants to be called again."""
# The number of the step, its time, what was made in it, and what had died by then. A plain tuple,
# and no class of one, which takes six times as long to make.
_Step = tuple[int, int, list[Entry], list[Entry]]


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
        stream: the allocator's events of the thread.
        is_open: whether it takes notes.
        n_events: storages that were made, and that died.
        began_ns: when it was started, by ``time.perf_counter_ns()``.
    """

    def __init__(self, places: Places, sample: Sample, failed: Failed) -> None:
        self.outliving = Outliving()
        self.host = Account(torch.device("cpu"), self.outliving)
        self.accounts = {self.host.device: self.host}
        self.stream = this_stream()
        self.is_open = False
        self.n_events = 0
        self.began_ns = 0
        self._places, self._sample, self.failed = places, sample, failed
        self.bands = Bands(self.step)
        self._next_sample_ns = 0
        self._entries: dict[int, Entry] = {}
        self._numbers = itertools.count()
        self._last_number = 0
        self._dead: list[Entry] = []
        self._remade: list[Entry] = []
        self._summed: Entry | None = None
        self._live = allocator.live_counter()
        self._host_base = self._n_missed = 0
        self._tolerated = 0
        self._is_prepared = self._is_looking = False

    @property
    def has_missed(self) -> bool:
        """Whether another profiler had the allocator's events at some time."""
        return self.stream.n_missed > self._n_missed

    # --- from the beginning to the end

    def open(self) -> None:
        """Begin; what is alive already is told by ``know`` next, and then it starts."""
        process.open()
        self._is_prepared = True
        self.stream.follow(self)
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
        self.outliving.step(self._last_number)

    def start(self) -> None:
        """All that was alive is known: what follows is the program's doing."""
        self.began_ns = time.perf_counter_ns()
        self.is_open = True
        self.bands.open(self.began_ns)
        self._host_base = self.host.known_bytes - self._live.value
        self._n_missed = self.stream.n_missed
        for account in self.accounts.values():
            account.begin()
        self._look([])

    def close(self) -> None:
        """Tell what is still to be told, and leave torch as it was."""
        if self.is_open:
            self._look([])
            self.stream.leave(self)
            self.is_open = False
            number, at_ns = next(self._numbers), self.elapsed_ns()
            for account in self.accounts.values():
                account.look(number, at_ns, is_last=True)
            for entry in list(self._entries.values()):
                entry.account.tell(entry, FOREVER)
        self.stream.leave(self)
        tell_no_more(self.resized)
        self.bands.close()
        if self._is_prepared:
            self._is_prepared = False
            process.close()
        self._entries.clear()

    def abandon(self) -> None:
        """Take no more notes, at the end of the interpreter and in a forked child."""
        self.is_open = False
        self.stream.abandon()

    # --- told by the mode

    def made(self, out: Any, args: tuple[Any, ...], kind: int, caller: Any) -> None:
        """See `Told`."""
        if has_function_modes():
            with without_functions():
                self._note(out, args, kind, caller)
        else:
            self._note(out, args, kind, caller)

    def sums(self, first: UntypedStorage, total: UntypedStorage) -> None:
        """See `Told`."""
        entry = self._entries.get(key_of(first))
        if entry is not None and entry.asked_bytes == total.nbytes():
            self._forget(entry)
            self._summed = entry
            if entry.account is self.host:
                self.stream.hide_sum(entry.asked_bytes)

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

    def look(self) -> None:
        """See `tenure._stream.Consumer`."""
        # a call of this very class may have been what let the stream be read
        if not self._is_looking:
            self.step()

    def _look(self, made: list[Entry]) -> None:
        """End a step, and mark its end among the allocator's events."""
        self._is_looking = True
        number = self._last_number = next(self._numbers)
        at_ns = self.elapsed_ns()
        # Taken before the step is marked: what dies from here on belongs to the next one.
        dead, self._dead = self._dead, []
        if self._remade:
            made, self._remade = made + self._remade, []
        if self._summed is not None:
            dead.append(self._summed)
            self._summed = None
        if len(self.accounts) > 1:
            for account in {id(entry.account): entry.account for entry in made}.values():
                account.look(number, at_ns)
        step: _Step = number, at_ns, made, dead
        self.stream.mark(self, step)
        if made:
            self.stream.resume()
        self._is_looking = False
        if at_ns >= self._next_sample_ns:
            self._next_sample_ns = self._sample(at_ns, self._host_base + self._live.value)

    def elapsed_ns(self) -> int:
        """Since it was started."""
        return time.perf_counter_ns() - self.began_ns

    def take(self, claim: _Step, changes: list[int], level_bytes: int) -> None:
        """See `tenure._stream.Consumer`: tell the columns what has happened in a step."""
        number, at_ns, made, dead = claim
        self.n_events += len(made) + len(dead)
        high = level_bytes
        if len(changes) > 1:
            high += max(accumulate(changes)) - sum(changes)
        self.host.series.add(number, at_ns, self._host_base + high)
        for entry in made:
            entry.begin = number
        for entry in dead:
            entry.account.tell(entry, number)

    def miss(self, claim: _Step, was_bytes: int, level_bytes: int) -> None:
        """See `tenure._stream.Consumer`."""
        self.take(claim, [], level_bytes)
