"""What happens to storages, step by step, as operations and finalizers tell of it.

A step ends when an operation has made storages. Its level is the highest within it, temporaries of
operations included: each step is a mark in the stream of the thread.

Invariants: no storage is kept alive; what a storage was, where it was made and how long it lived is
told to the account of its device once; while another profiler has this thread, the level at the end
of each step stands for the highest within it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from threading import get_ident
from typing import Any

import torch
from torch import UntypedStorage

from tenure._host_memory import resident_bytes
from tenure._registries import scope_watchers
from tenure._stream import process, run, storages_in, this_stream
from tenure._torch import cpu_allocator as allocator
from tenure._torch.autograd import is_running_node
from tenure._torch.compiler import never_compiled
from tenure._torch.gradient_sums import prepare
from tenure._torch.modes import EagerMode, has_function_modes, schema_of
from tenure._torch.quiet import without_functions
from tenure._torch.resizing import tell, tell_no_more
from tenure._torch.storages import key_of
from tenure.scopes import current_scope

from .._owners import OTHERS
from ._account import IN_BACKWARD, INPUTS, TimedStorage, TimelineAccount
from ._places import BEFORE, Places
from ._series import FOREVER, Series
from ._timeline_report import OUTSIDE, ScopeSpan

_aten = torch.ops.aten
_LIFTS = frozenset({_aten.lift_fresh.default, _aten.lift.default})
"""Operations that ``torch.tensor``, ``torch.from_numpy`` and the like end with."""
_RESIZERS = frozenset({_aten.resize_, _aten.resize_as_})
_COPIES = frozenset({_aten._to_copy, _aten._pin_memory, _aten.clone})
NOTHING, MAKES, ADOPTS, COPIES = range(4)
"""The effect of an operation on storages: it makes none, makes or resizes some, takes
one over that was made elsewhere, or makes one of the data of another."""
_known: dict[Any, int] = {}
_SAMPLE_NS = 50_000_000
# of more the longest are kept
_MOST_SPANS = 4096
_NS = 1e9
# The number of the step, its time, and what had died by then. A plain tuple, and no class of one,
# which takes six times as long to make.
_Step = tuple[int, int, list[TimedStorage]]


class TimelineRecorder:
    """Notes what the operations of one thread make, and when it dies.

    Args:
        failed: called with the error of an operation, whose frames are alive.

    Attributes:
        places: where things are made.
        spans: the stretches in which scopes of the thread were the current ones.
        n_dropped: how many short ones were left out.
        host: the account of the host.
        accounts: the accounts of all devices.
        rss: the resident memory of the process.
        stream: the allocator's events of the thread.
        is_open: whether it takes notes.
        n_events: storages that were made, and that died.
        n_missed: how many marks of the stream had no events before it was started.
        began_ns: when it was started, by ``time.perf_counter_ns()``.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.failed = failed
        self.places = Places()
        self.spans: list[ScopeSpan] = []
        self.n_dropped = 0
        self.host = TimelineAccount(torch.device("cpu"))
        self.accounts = {self.host.device: self.host}
        self.rss = Series(1024)
        self.stream = this_stream()
        self.is_open = False
        self.n_events = self.n_missed = self.began_ns = 0
        self._next_sample_ns = 0
        self._thread = get_ident()
        # by the identity of the scope: its name, the depth, and when it began
        self._open_scopes: dict[int, tuple[str, int, float]] = {}
        self._entries: dict[int, TimedStorage] = {}
        self._dead: list[TimedStorage] = []
        # that of the step which has not ended
        self._number = 0
        self._live = allocator.live_counter()
        self._host_base = 0
        self._is_prepared = self._is_looking = False

    # --- from the beginning to the end

    def open(self) -> None:
        """Begin; what is alive already is told by ``learn`` next, and then it starts."""
        process.open()
        self._is_prepared = True
        self.stream.follow(self)
        tell(self.resized)

    def learn(self, storage: UntypedStorage, category: str) -> None:
        """Note what a storage counts as, if it is known; before the start, note it."""
        entry = self._entries.get(key_of(storage))
        if entry is None and not self.is_open:
            self._enter(storage, BEFORE, category or OTHERS, storage.nbytes())
        elif entry is not None and category:
            entry.category = category

    def start(self) -> None:
        """Start, with all live storages known: the program makes the following events."""
        self.began_ns = time.perf_counter_ns()
        self.is_open = True
        scope: Any = current_scope()
        around = []
        while scope is not None:
            around.append(scope)
            scope = scope.outer
        for scope in reversed(around):
            self._enter_scope(scope, 0.0)
        scope_watchers.append(self)
        self._host_base = self.host.known_bytes - self._live.value
        self.n_missed, self.n_events = self.stream.n_missed, 0
        for account in self.accounts.values():
            account.begin()
        self.look()

    def close(self) -> None:
        """Tell what is still to be told, and leave torch as it was."""
        if self.is_open:
            self.look()
            self.stream.leave(self)
            self.is_open = False
            at_ns = self.elapsed_ns()
            for account in self.accounts.values():
                account.look(self._number, at_ns, is_last=True)
            for entry in list(self._entries.values()):
                entry.account.tell(entry, FOREVER)
        self.stream.leave(self)
        tell_no_more(self.resized)
        if self in scope_watchers:
            scope_watchers.remove(self)
        for identity in list(self._open_scopes):
            self._leave_scope(identity)
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
        """Note what an operation of a kind has given back."""
        if has_function_modes():
            with without_functions():
                self._note(out, args, kind, caller)
        else:
            self._note(out, args, kind, caller)

    def sums(self, first: UntypedStorage, total: UntypedStorage) -> None:
        """Note that ``total`` takes the place of ``first``, to which autograd adds in place."""
        entry = self._entries.get(key_of(first))
        # the counters of an accelerator have both at once
        if not self.is_open or entry is None or entry.account is not self.host:
            return
        if entry.n_bytes == total.nbytes():
            self._end_life(entry)
            self.stream.hide_sum(entry.n_bytes)

    # --- told by scopes

    def began(self, scope: Any) -> None:
        """See `tenure._registries.ScopeWatcher`."""
        if get_ident() == self._thread:
            self.look()
            self._enter_scope(scope, self.elapsed_ns() / _NS)

    def ended(self, scope: Any) -> None:
        """See `tenure._registries.ScopeWatcher`."""
        if get_ident() == self._thread:
            self.look()
            self._leave_scope(id(scope))

    def _enter_scope(self, scope: Any, at_s: float) -> None:
        name = scope.name or f"the scope at {scope.site}"
        self._open_scopes[id(scope)] = name, len(self._open_scopes), at_s

    def _leave_scope(self, identity: int) -> None:
        # told once more when it has disposed what it owned
        if (found := self._open_scopes.pop(identity, None)) is None:
            return
        self.spans.append(ScopeSpan(*found, self.elapsed_ns() / _NS))
        if len(self.spans) > _MOST_SPANS:
            self.spans.sort(key=lambda span: span.begin_s - span.end_s)
            self.n_dropped += len(self.spans) - _MOST_SPANS // 2
            del self.spans[_MOST_SPANS // 2 :]

    # --- what was made

    def _note(self, out: Any, args: tuple[Any, ...], kind: int, caller: Any) -> None:
        place = -1
        for storage in storages_in(out):
            if self._has(storage, storage.nbytes()):
                continue
            if place < 0:
                place = self.places.of(caller)
            is_input = kind == ADOPTS or self.places.are_inputs[place]
            if kind == COPIES:
                is_input |= any(map(self._is_input, storages_in(args)))
            self._enter(storage, place, INPUTS if is_input else OTHERS, storage.nbytes())
        if place >= 0:
            self.look()
            self.stream.resume()

    def resized(self, storage: UntypedStorage, n_bytes: int) -> None:
        """Note that a storage is about to be resized outside operations: `storage.resize_()`."""
        if self.is_open and not self._has(storage, n_bytes):
            self._enter(storage, self.places.of(sys._getframe(1)), OTHERS, n_bytes)

    def _has(self, storage: UntypedStorage, n_bytes: int) -> bool:
        """Return whether a storage is known with this size."""
        entry = self._entries.get(key_of(storage))
        return entry is not None and entry.n_bytes == entry.account.taken_by(n_bytes)

    def _is_input(self, storage: UntypedStorage) -> bool:
        entry = self._entries.get(key_of(storage))
        return not storage.resizable() if entry is None else entry.category == INPUTS

    def _enter(self, storage: UntypedStorage, place: int, category: str, n_bytes: int) -> None:
        """Note a storage that is new, or has a new size."""
        device, before = storage.device, self._entries.get(key_of(storage))
        if before is not None:
            self._end_life(before)
            category = before.category
        elif is_running_node():
            category = IN_BACKWARD
        # memory of numpy's, of a file, or that another process shares is not the allocator's
        if not n_bytes or device.type == "meta" or not storage.resizable():
            return
        account = self.accounts.get(device)
        if account is None:
            account = self.accounts[device] = TimelineAccount(device)
        entry = TimedStorage(storage, self._died)
        entry.key, entry.account, entry.place = key_of(storage), account, place
        entry.scope = self._open_scopes.get(id(current_scope()), (OUTSIDE,))[0]
        entry.category, entry.begin = category, self._number
        entry.n_bytes, entry.went_in_backward = account.taken_by(n_bytes), False
        self._entries[entry.key] = entry
        account.known_bytes += entry.n_bytes
        self.n_events += 1

    def _died(self, reference: Any) -> None:
        """Note that a storage died; a finalizer, on any thread and at any moment."""
        entry: Any = self._entries.get(reference.key)
        if entry is reference:
            self._end_life(entry)

    def _end_life(self, entry: TimedStorage) -> None:
        """End the life that a storage had, with this size; the rest is done as the step is read."""
        del self._entries[entry.key]
        entry.account.known_bytes -= entry.n_bytes
        entry.went_in_backward = is_running_node()
        self._dead.append(entry)

    # --- steps

    def look(self) -> None:
        """End a step, and mark its end among the allocator's events; see `Consumer`."""
        # a call of this very function may have been what let the stream be read
        if not self.is_open or self._is_looking:
            return
        self._is_looking = True
        try:
            number, at_ns = self._number, self.elapsed_ns()
            # Taken before the step is marked: what dies from here on belongs to the next one.
            dead, self._dead = self._dead, []
            self._number += 1
            for account in list(self.accounts.values()):
                account.look(number, at_ns)
            step: _Step = number, at_ns, dead
            self.stream.mark(self, step)
        finally:
            self._is_looking = False
        if at_ns >= self._next_sample_ns:
            self._next_sample_ns = at_ns + _SAMPLE_NS
            self.rss.add(number, at_ns, resident_bytes())

    def elapsed_ns(self) -> int:
        """Since it was started."""
        return time.perf_counter_ns() - self.began_ns

    def take(self, claim: _Step, changes: list[int], level_bytes: int) -> None:
        """See `tenure._stream.Consumer`: tell the accounts what has happened in a step."""
        number, at_ns, dead = claim
        self.n_events += len(dead)
        high = level_bytes
        if len(changes) > 1:
            high += max(accumulate(changes)) - sum(changes)
        self.host.series.add(number, at_ns, self._host_base + high)
        for entry in dead:
            entry.account.tell(entry, number)

    def miss(self, claim: _Step, was_bytes: int, level_bytes: int) -> None:
        """See `tenure._stream.Consumer`."""
        self.take(claim, [], level_bytes)


class OperationMode(EagerMode):
    """Tells of the operations of the thread that entered it, those of backward passes included."""

    supports_higher_order_operators = True

    def __init__(self, recorder: TimelineRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._recorder = recorder
        prepare()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile as without it: what runs compiled is told by the allocator alone."""
        return True

    @never_compiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and tell the recorder what it made."""
        recorder, kind = self._recorder, _known.get(func)
        if kind is None:
            kind = _known[func] = _kind_of(func)
        try:
            sums = recorder.sums
            out = run(func, args, kwargs or {}, mode=self, stream=recorder.stream, sums=sums)
        except Exception as error:
            if recorder.is_open:
                recorder.failed(error)
            raise
        if kind and recorder.is_open:
            # None on a thread of autograd's engine
            recorder.made(out, args, kind, sys._getframe().f_back)
        return out


def _kind_of(func: Any) -> int:
    schema = schema_of(func)
    # a higher-order operator
    if schema is None:
        return MAKES
    packet = func.overloadpacket
    if func in _LIFTS or packet is _aten.set_:
        return ADOPTS
    if packet in _RESIZERS or any(argument.is_out for argument in schema.arguments):
        return MAKES
    if packet in _COPIES:
        return COPIES
    # what it gives back are its arguments, or views of them
    if all(each.alias_info is not None for each in schema.returns):
        return NOTHING
    return MAKES
