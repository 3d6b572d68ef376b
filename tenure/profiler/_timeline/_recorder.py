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
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from threading import get_ident
from typing import Any

import torch
from torch import UntypedStorage
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._host_memory import resident_bytes
from tenure._oom import oom_of_work
from tenure._registries import refusal_watchers, scope_watchers
from tenure._stream import process, run, storages_in, this_stream
from tenure._torch import cpu_allocator as allocator
from tenure._torch.autograd import is_running_node
from tenure._torch.compiler import never_compiled
from tenure._torch.gradient_sums import prepare
from tenure._torch.modes import EagerMode, remove_dispatch, schema_of
from tenure._torch.quiet import without_functions
from tenure._torch.resizing import tell, tell_no_more
from tenure._torch.storages import key_of
from tenure.scopes import current_scope

from .._owners import OTHERS, take_census
from ._account import IN_BACKWARD, INPUTS, TimedStorage, TimelineAccount, compose
from ._places import BEFORE, Places
from ._series import FOREVER, Series
from ._timeline_report import OUTSIDE, HostTimeline, OomMark, ScopeSpan, TimelineReport

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
# of more the first are kept
_MOST_OOMS = 200
# Who has what is asked for at most so much of the time: a twentieth where something did not fit, as
# in a program that runs out of memory again and again, and a hundredth after steps.
_OOM_SHARE, _STEP_SHARE = 20, 100
_NS = 1e9
# The number of the step, its time, and what had died by then. A plain tuple, and no class of one,
# which takes six times as long to make.
_Step = tuple[int, int, list[TimedStorage]]


class TimelineRecorder(EagerMode):
    """Notes what the operations of one thread make, and when it dies.

    It is the mode that these operations meet, those of backward passes included.

    Args:
        keeps_before: whether a storage that was there before counts also once it is freed, so that
            what is above the level of the beginning was made since.

    Attributes:
        stream: the allocator's events of the thread.
        is_open: whether it takes notes.
    """

    supports_higher_order_operators = True

    def __init__(self, *, keeps_before: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        prepare()
        self._keeps_before = keeps_before
        self.stream = this_stream()
        self.is_open = False
        self._undo: list[Callable[[], object]] = []
        self._thread = get_ident()
        self._places = Places()
        self._host = TimelineAccount(torch.device("cpu"))
        self._accounts = {self._host.device: self._host}
        # the resident memory of the process
        self._rss = Series(1024)
        self._spans: list[ScopeSpan] = []
        # by the identity of the scope: its name, the depth, and when it began
        self._open_scopes: dict[int, tuple[str, int, float]] = {}
        self._ooms: list[OomMark] = []
        self._notes: list[str] = []
        self._entries: dict[int, TimedStorage] = {}
        self._dead: list[TimedStorage] = []
        # that of the step which has not ended
        self._number = 0
        self._n_events = self._n_missed = self._n_dropped = self._began_ns = 0
        self._next_sample_ns = self._learned_ns = self._learning_ns = 0
        self._limited_text: str | None = None
        self._live = allocator.live_counter()
        self._host_base = 0
        self._is_looking = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile as without it: what runs compiled is told by the allocator alone."""
        return True

    # --- from the beginning to the end

    def open(self) -> None:
        """Begin, with all live storages known."""
        process.open()
        self._undo.append(process.close)
        self.stream.follow(self)
        self._undo.append(lambda: self.stream.leave(self))
        tell(self.resized)
        self._undo.append(lambda: tell_no_more(self.resized))
        for storage, category in _census():
            self._enter(storage, BEFORE, category or OTHERS, storage.nbytes())
        self._began_ns = time.perf_counter_ns()
        self.is_open = True
        scope: Any = current_scope()
        around = []
        while scope is not None:
            around.append(scope)
            scope = scope.outer
        for scope in reversed(around):
            self._enter_scope(scope, 0.0)
        self._join(scope_watchers, self)
        self._join(refusal_watchers, self._limited)
        self._host_base = self._host.known_bytes - self._live.value
        self._n_missed, self._n_events = self.stream.n_missed, 0
        for account in self._accounts.values():
            account.begin()
        self.look()
        # what passed since it was started is no part of the time on the system's clock
        self._began_at_ns = time.time_ns() - self._elapsed_ns()
        # parameters and the state of an optimizer may be gone at the end, with their function
        self._undo.append(register_optimizer_step_post_hook(self._stepped).remove)
        self._join(self.stream.modes, self)
        self._undo.append(lambda: remove_dispatch(self))
        self.__enter__()  # type: ignore[no-untyped-call]

    def _join(self, members: list[Any], member: Any) -> None:
        def leave() -> None:
            if member in members:
                members.remove(member)

        members.append(member)
        self._undo.append(leave)

    def close(self) -> TimelineReport:
        """End, and return the report; after an error in here, `abandon` leaves torch as it was."""
        remove_dispatch(self)
        duration_s = self._elapsed_ns() / _NS
        self._learn(0)
        self.look()
        self.stream.leave(self)
        self.is_open = False
        at_ns = self._elapsed_ns()
        for account in self._accounts.values():
            account.look(self._number, at_ns, is_last=True)
        for entry in list(self._entries.values()):
            entry.account.tell(entry, FOREVER)
        for identity in list(self._open_scopes):
            self._leave_scope(identity)
        self.abandon()
        return self._composed(duration_s)

    def abandon(self) -> None:
        """Leave torch as it was: at the end, after an error, and in a forked child."""
        if self.is_open:
            self.is_open = False
            self.stream.abandon()
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self._entries.clear()

    def _composed(self, duration_s: float) -> TimelineReport:
        accounts = self._accounts.values()
        devices = tuple(compose(account, self._places) for account in accounts)
        self._notes += [note for account in accounts for note in account.notes()]
        if self.stream.n_missed > self._n_missed:
            self._note(
                "temporaries inside operations were not all seen: another profiler had its thread"
            )
        if self._n_dropped:
            self._note(f"{self._n_dropped} short scopes are left out")
        rss = self._rss.moments
        return TimelineReport(
            devices=devices,
            scopes=tuple(sorted(self._spans, key=lambda span: (span.begin_s, span.depth))),
            ooms=tuple(self._ooms),
            host=HostTimeline(
                tuple(moment.at_ns / _NS for moment in rss), tuple(each.n_bytes for each in rss)
            ),
            n_events=self._n_events,
            duration_s=duration_s,
            began_at_ns=self._began_at_ns,
            notes=tuple(self._notes),
        )

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    # --- what storages count as, and errors of memory

    def _learn(self, share: int) -> None:
        """Note what the storages that are alive count as, if the last time was long ago.

        Args:
            share: how many times as long ago as it took; 0 asks whenever it was.
        """
        began_ns = time.perf_counter_ns()
        if began_ns < self._learned_ns + share * self._learning_ns:
            return
        try:
            for storage, category in _census():
                entry = self._entries.get(key_of(storage))
                if entry is not None and category:
                    entry.category = category
        # memory may be short just now; the program has an error of its own to handle
        except Exception as error:
            self._note(f"who had what could not be asked at some time: {error!r}")
        self._learned_ns = time.perf_counter_ns()
        self._learning_ns = self._learned_ns - began_ns

    def _stepped(self, *_: object) -> None:
        if self.is_open and get_ident() == self._thread:
            self._learn(_STEP_SHARE)

    def _failed(self, error: Exception) -> None:
        """Note an error of an operation, whose frames are alive, if it is one of memory."""
        # the context is an error that the program handles just now, and was noted when it was new
        info = oom_of_work(error, error.__context__)
        # a limit below the mode has told of it already
        if info is not None and info.text != self._limited_text:
            self._note_oom(info.text)
        self._limited_text = None

    def _limited(self, text: str) -> None:
        """Note that a limit has refused an allocation, above the mode or below it."""
        if self.is_open:
            self._limited_text = text
            self._note_oom(text)

    def _note_oom(self, text: str) -> None:
        self.look()
        if len(self._ooms) < _MOST_OOMS:
            self._ooms.append(OomMark(self._elapsed_ns() / _NS, text.partition("\n")[0]))
        else:
            self._note(f"memory ran out more than {_MOST_OOMS} times: the first are marked")
        # who has what is gone when the error is handled
        self._learn(_OOM_SHARE)

    # --- told by scopes

    def began(self, scope: Any) -> None:
        """See `tenure._registries.ScopeWatcher`."""
        if get_ident() == self._thread:
            self.look()
            self._enter_scope(scope, self._elapsed_ns() / _NS)

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
        self._spans.append(ScopeSpan(*found, self._elapsed_ns() / _NS))
        if len(self._spans) > _MOST_SPANS:
            self._spans.sort(key=lambda span: span.begin_s - span.end_s)
            self._n_dropped += len(self._spans) - _MOST_SPANS // 2
            del self._spans[_MOST_SPANS // 2 :]

    # --- what was made

    @never_compiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note what it made."""
        kind = _known.get(func)
        if kind is None:
            kind = _known[func] = _kind_of(func)
        try:
            out = run(func, args, kwargs or {}, mode=self, stream=self.stream, sums=self._sums)
        except Exception as error:
            if self.is_open:
                self._failed(error)
            raise
        if kind and self.is_open:
            # None on a thread of autograd's engine
            caller = sys._getframe().f_back
            with without_functions():
                self._made(out, args, kind, caller)
        return out

    def _made(self, out: Any, args: tuple[Any, ...], kind: int, caller: Any) -> None:
        place = -1
        for storage in storages_in(out):
            if self._has(storage, storage.nbytes()):
                continue
            if place < 0:
                place = self._places.of(caller)
            is_input = kind == ADOPTS or self._places.are_inputs[place]
            if kind == COPIES:
                is_input |= any(map(self._is_input, storages_in(args)))
            self._enter(storage, place, INPUTS if is_input else OTHERS, storage.nbytes())
        if place >= 0:
            self.look()
            self.stream.resume()

    def _sums(self, first: UntypedStorage, total: UntypedStorage) -> None:
        """Note that ``total`` takes the place of ``first``, to which autograd adds in place."""
        entry = self._entries.get(key_of(first))
        # the counters of an accelerator have both at once
        if not self.is_open or entry is None or entry.account is not self._host:
            return
        if entry.n_bytes == total.nbytes():
            if entry.place == BEFORE:
                self._enter(total, BEFORE, entry.category, total.nbytes())
            self._end_life(entry)
            self.stream.hide_sum(entry.n_bytes)

    def resized(self, storage: UntypedStorage, n_bytes: int) -> None:
        """Note that a storage is about to be resized outside operations: `storage.resize_()`."""
        if self.is_open and not self._has(storage, n_bytes):
            self._enter(storage, self._places.of(sys._getframe(1)), OTHERS, n_bytes)

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
        account = self._accounts.get(device)
        if account is None:
            account = self._accounts[device] = TimelineAccount(device)
        entry = TimedStorage(storage, self._died)
        entry.key, entry.account, entry.place = key_of(storage), account, place
        entry.scope = self._open_scopes.get(id(current_scope()), (OUTSIDE,))[0]
        entry.category, entry.begin = category, self._number
        entry.n_bytes = account.taken_by(n_bytes)
        entry.went_in_backward = entry.stays = False
        self._entries[entry.key] = entry
        account.known_bytes += entry.n_bytes
        self._n_events += 1

    def _died(self, reference: Any) -> None:
        """Note that a storage died; a finalizer, on any thread and at any moment."""
        entry: Any = self._entries.get(reference.key)
        if entry is reference:
            entry.stays = self._keeps_before and entry.place == BEFORE
            self._end_life(entry)

    def _end_life(self, entry: TimedStorage) -> None:
        """End the life that a storage had, with this size; the rest is done as the step is read."""
        del self._entries[entry.key]
        entry.account.known_bytes -= entry.n_bytes
        entry.account.stayed_bytes += entry.stays * entry.n_bytes
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
            number, at_ns = self._number, self._elapsed_ns()
            # Taken before the step is marked: what dies from here on belongs to the next one.
            dead, self._dead = self._dead, []
            self._number += 1
            for account in list(self._accounts.values()):
                account.look(number, at_ns)
            step: _Step = number, at_ns, dead
            self.stream.mark(self, step)
        finally:
            self._is_looking = False
        if at_ns >= self._next_sample_ns:
            self._next_sample_ns = at_ns + _SAMPLE_NS
            self._rss.add(number, at_ns, resident_bytes())

    def _elapsed_ns(self) -> int:
        """Since it was started."""
        return time.perf_counter_ns() - self._began_ns

    def take(self, claim: _Step, changes: list[int], level_bytes: int) -> None:
        """See `tenure._stream.Consumer`: tell the accounts what has happened in a step."""
        number, at_ns, dead = claim
        self._n_events += len(dead)
        for n_bytes in [entry.n_bytes for entry in dead if entry.stays]:
            self._host_base += n_bytes
            if -n_bytes in changes:
                changes.remove(-n_bytes)
        high = level_bytes
        if len(changes) > 1:
            high += max(accumulate(changes)) - sum(changes)
        self._host.series.add(number, at_ns, self._host_base + high)
        for entry in dead:
            entry.account.tell(entry, FOREVER if entry.stays else number)

    def miss(self, claim: _Step, was_bytes: int, level_bytes: int) -> None:
        """See `tenure._stream.Consumer`."""
        self.take(claim, [], level_bytes)


def _census() -> Iterator[tuple[UntypedStorage, str]]:
    """Return the storages that are alive, and what each counts as; empty where nothing owns it."""
    for entry in take_census(named=False):
        storage = entry.identity() if entry.identity is not None else None
        if storage is not None:
            yield storage, "" if entry.owner.category == OTHERS else entry.owner.category


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
