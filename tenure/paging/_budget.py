"""Budgets that several models share, and the one that follows what is free on a device.

The model that runs takes memory from the others, from the one first that ran longest ago. In the
first pass after that all of it is copied anew; so a model whose turns are short takes only what no
copy of another one needs, or what one has whose turns are shorter still.

What is free is looked at as passes show it. Nothing is synchronized, emptied or reset for that.
Memory that other processes take is seen in what the device has free; what the allocator has cached
is computation's, as far as it was needed.

Invariant: what the models of a budget hold together never exceeds its limit, for nothing is taken
before it was given back. Nobody waits for another model here: one that runs on another thread is
left alone, and of one that runs on this thread goes only what is not in use.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch

from tenure._account import available_bytes
from tenure._cuda_blocks import LARGE_SEGMENT_BYTES
from tenure._devices import free_memory, told_by
from tenure._errors import PagingError
from tenure._host_memory import free_host_bytes
from tenure._text import counted, format_bytes, parse_bytes, parse_share

from ._engine import Engine
from ._room import Lease, Room

_REMEMBERED = 8
_FRAGMENTS = 1 / 8
"""Of what computation allocates: what its allocator may lose between blocks."""
_MARGIN_SHARE = 1 / 32
"""Of the device's memory: what is left free beside what computation was seen to need."""


class MemoryReading(NamedTuple):
    """The memory of a device at one moment.

    Attributes:
        free_bytes: of the device.
        total_bytes: of the device; of a host, what was free at first.
        cached_bytes: what this process's allocator has and nothing uses.
        allocated_bytes: what tensors have.
        peak_bytes: the most that they had.
    """

    free_bytes: int
    total_bytes: int
    cached_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0


def read(device: torch.device) -> MemoryReading:
    """Look at a device.

    Raises:
        PagingError: it can't tell what is free.
    """
    if device.type == "cpu":
        free_bytes = available_bytes(device, free_host_bytes())
        return MemoryReading(free_bytes, free_bytes)
    module = torch.get_device_module(device)
    told = free_memory(module, device)
    if told is None:
        raise PagingError(
            f"torch.{device.type} can't tell how much of {str(device)!r} is free, which "
            'budget="auto" follows. Write budget= as a number of bytes, such as "6GiB".'
        )
    # Not the flat form: a hundred names are made for that, each time.
    nested = told_by(module, "memory_stats_as_nested_dict", device) or {}
    reserved = nested.get("reserved_bytes", {}).get("all", {})
    allocated = nested.get("allocated_bytes", {}).get("all", {})
    now_bytes = allocated.get("current", 0)
    cached_bytes = max(0, reserved.get("current", 0) - now_bytes)
    free_bytes, total_bytes = told
    free_bytes = min(free_bytes, available_bytes(device, free_bytes + cached_bytes))
    return MemoryReading(free_bytes, total_bytes, cached_bytes, now_bytes, allocated.get("peak", 0))


class Gauge:
    """The room that one device leaves for weights, as passes show it.

    A need that was seen is not forgotten within the passes that are remembered.

    Args:
        device: the device.

    Raises:
        PagingError: it can't tell what is free.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = read(device)
        self._total_bytes = self._last.total_bytes
        # What a pass needs for moments between two looks, as far as the allocator's peaks tell.
        self._moment_bytes = 0
        # The most that computation took between two looks.
        self._stride_bytes = 0
        self._is_in_segments = False
        # What weights could have had, at the looks of a pass and in the passes before it.
        self._looks: list[int] = []
        self._rooms: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def is_sure(self) -> bool:
        """It remembers as many passes as it can."""
        return len(self._rooms) == _REMEMBERED

    @property
    def room_bytes(self) -> int:
        """What weights may have so that the next pass has what the last ones needed."""
        return max(0, min([*self._rooms, self._left_bytes]) - self._margin_bytes)

    def short_bytes(self, held_bytes: int) -> int:
        """Return the bytes that computation lacked at the last check; 0 if half the margin is free.

        Where a pass needs more than any that is remembered, as the first one does, what it took
        between two looks it may take once more before the next.
        """
        room_bytes, margin_bytes = self._looks[-1], self._margin_bytes
        is_known = room_bytes >= min(self._rooms, default=room_bytes + 1)
        stride_bytes = 0 if is_known else 2 * self._stride_bytes
        free_bytes = room_bytes - held_bytes
        if free_bytes >= max(margin_bytes // 2, stride_bytes):
            return 0
        return max(margin_bytes, 2 * stride_bytes) - free_bytes

    def look(self, held_bytes: int) -> None:
        """Note what is free at this moment of a pass.

        Args:
            held_bytes: what weights have of the device.
        """
        last, now = self._last, read(self._device)
        if now.peak_bytes < last.peak_bytes:
            # Somebody has begun to count anew.
            self._moment_bytes = 0
        elif now.peak_bytes > last.peak_bytes:
            moment_bytes = now.peak_bytes - max(last.allocated_bytes, now.allocated_bytes)
            self._moment_bytes = max(self._moment_bytes, moment_bytes)
        self._last = now
        self._is_in_segments |= now.cached_bytes > 0
        room_bytes = self.space_bytes(held_bytes)
        if self._looks:
            self._stride_bytes = max(self._stride_bytes, self._looks[-1] - room_bytes)
        self._looks.append(room_bytes)

    def rebase(self) -> None:
        """Weights were given back or taken: what is counted from here on is computation's."""
        self._last = read(self._device)

    def end_pass(self) -> None:
        """Remember what the pass that is over has left for weights."""
        self._rooms.append(self._left_bytes)
        self._looks.clear()

    def forget(self) -> None:
        """Be sure only after as many passes as at first."""
        self._rooms.clear()

    @property
    def _margin_bytes(self) -> int:
        # The first tensor of another size may need a segment of its own.
        least_bytes = LARGE_SEGMENT_BYTES if self._is_in_segments else 0
        return max(int(self._total_bytes * _MARGIN_SHARE), least_bytes)

    @property
    def _left_bytes(self) -> int:
        """The bytes that the pass has left for weights so far."""
        return min(self._looks) - self._moment_bytes

    def space_bytes(self, held_bytes: int) -> int:
        """Return the room for weights at the last look: of the cache, the part not in fragments."""
        now = self._last
        used_bytes = max(0, now.allocated_bytes - held_bytes)
        fragments_bytes = int(used_bytes * _FRAGMENTS) + 2 * LARGE_SEGMENT_BYTES
        return held_bytes + now.free_bytes + max(0, now.cached_bytes - fragments_bytes)


AUTO = "auto"
_FIRST_SHARE = 3 / 4
"""Of what is free: what weights have before the first pass has shown what computation needs."""
_SHORT_TURN = 2
"""In a turn of so few passes it costs as much to copy what was taken as it saves."""
_autos: weakref.WeakValueDictionary[str, PagingBudget] = weakref.WeakValueDictionary()
_autos_lock = RLock()
_Planned = TypeVar("_Planned")
_Plan = Callable[[int, int], _Planned]
"""Of the bytes that it may have, and of those that nothing has now."""


class Giver(Protocol):
    """Who lets a model's units go, where nothing uses them."""

    def give_back(self, n_bytes: int) -> int:
        """Give back so many bytes, or what there is, without waiting; how many."""
        ...


class PagingBudget:
    """Bytes of a device that the weights of several paged models share.

    Each model that is paged with ``budget=`` this one has a small part for itself, what it needs at
    the least. The rest goes to whichever can use it: the model that runs has it first, and units of
    the others, which stayed, pass meanwhile. Models that take very short turns keep what they have.

    A budget belongs to the first device that a model is paged to with it.

    Args:
        limit: bytes, as an int or like ``"8GiB"``; ``"80%"`` of what is free when the first model
            is paged; or ``"auto"`` for what is free from pass to pass.

    Raises:
        ByteSizeError: it is no number of bytes.
        PagingError: it is no share of what is free.

    Example:
        >>> from tenure.paging import PagingBudget
        >>> PagingBudget("8GiB")
        <PagingBudget 8.0 GiB, no models>
    """

    def __init__(self, limit: int | str) -> None:
        self._follows = limit == AUTO
        self._asked = limit
        self._asked_share = None if self._follows else parse_share(limit)
        if self._asked_share == 0:
            raise PagingError(f"PagingBudget({limit!r}): a share goes from above 0% to 100%.")
        is_number = not self._follows and self._asked_share is None
        self._asked_bytes = parse_bytes(limit) if is_number else None
        # Reentrant: a collection under it may end a model of this budget.
        self._lock = RLock()
        self._device: torch.device | None = None
        self._gauge: Gauge | None = None
        # What a number or a share comes to; None where the limit follows what is free.
        self._cap_bytes = self._asked_bytes
        self._limit_bytes = self._asked_bytes
        # The one that ran last stands last.
        self._shares: list[weakref.ref[Share]] = []

    @property
    def limit_bytes(self) -> int | None:
        """What the models may have together now; None before the first one is paged."""
        with self._lock:
            return self._limit_bytes

    @property
    def held_bytes(self) -> int:
        """What they have together."""
        with self._lock:
            return sum(share.room.held_bytes for share in self._alive())

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            PagingError: always.
        """
        raise PagingError(
            f"{self!r} can't be pickled or copied: models of this process share it. Make another "
            "one with PagingBudget(...)."
        )

    def __repr__(self) -> str:
        limit = self.limit_bytes
        told = str(self._asked) if limit is None else format_bytes(limit)
        n_models = len(self._alive())
        if not n_models:
            return f"<PagingBudget {told}, no models>"
        held = format_bytes(self.held_bytes)
        return (
            f"<PagingBudget {told} on {self._device}, {held} in use by "
            f"{counted(n_models, 'model')}>"
        )

    def _fitted(self, device: torch.device, plan: _Plan[_Planned]) -> _Planned:
        """Return the plan of another model, without anything being done for it.

        Args:
            device: where.
            plan: makes it.

        Raises:
            PagingError: the budget belongs to another device, or this one can't tell what is free,
                or the plan does not fit.
        """
        with self._lock:
            self._come_to(device)
            # If all others gave what they can.
            rooms = [each.room for each in self._alive()]
            givable_bytes = sum(room.held_bytes - room.lasting_bytes for room in rooms)
            return self._planned(plan, self._left() + givable_bytes, self._left())

    def _join(
        self, device: torch.device, plan: _Plan[_Planned], size: Callable[[_Planned], int]
    ) -> tuple[_Planned, Share]:
        """Plan another model and give it a share, for which the others give back memory.

        Args:
            device: where.
            plan: makes it.
            size: what a plan allocates at first.

        Raises:
            PagingError: as of ``_fitted``.
        """
        with self._lock:
            planned = self._fitted(device, plan)
            self._ask(size(planned) - self._left())
            if size(planned) > self._left():
                # Those that run give nothing.
                planned = self._planned(plan, self._left(), self._left())
            share = Share(self, size(planned))
            self._shares.insert(0, weakref.ref(share))
            return planned, share

    def _planned(self, plan: _Plan[_Planned], most_bytes: int, now_bytes: int) -> _Planned:
        """Plan within the memory that the other models leave; the error says so."""
        try:
            return plan(most_bytes, now_bytes)
        except PagingError as error:
            if error.minimum_bytes is None or not self._alive():
                raise
            raise PagingError(
                f"{error} {format_bytes(most_bytes)} is what other models leave of {self!r}. You "
                "may also page this model before them.",
                error.minimum_bytes,
            ) from None

    def _leave(self, share: Share) -> None:
        self._shares = [each for each in self._shares if each() not in (None, share)]

    @property
    def _is_looking(self) -> bool:
        """Whether what is free matters: always, or until what was given back is taken again."""
        return self._follows or self._limit() < (self._cap_bytes or 0)

    def _limit(self) -> int:
        assert self._limit_bytes is not None
        return self._limit_bytes

    def _left(self) -> int:
        """Return the bytes that no model has; negative if the limit has fallen."""
        return self._limit() - self.held_bytes

    def _come_to(self, device: torch.device) -> None:
        """Belong to a device, and know what there is, where this is the first model there."""
        if self._alive():
            if device != self._device:
                raise PagingError(
                    f"{self!r} can't be used on {device} as well. Make another PagingBudget for "
                    "the models of that device."
                )
            return
        self._device, self._gauge, self._limit_bytes = device, None, self._asked_bytes
        if self._asked_bytes is None:
            self._gauge = Gauge(device)
            share = self._asked_share or _FIRST_SHARE
            self._limit_bytes = int(self._gauge.space_bytes(0) * share)
        self._cap_bytes = None if self._follows else self._limit_bytes

    def _follow(self) -> None:
        """Have the limit follow what is free: down at once, up if several passes had more room."""
        if not self._is_looking or self._device is None:
            return
        if self._gauge is None:
            try:
                self._gauge = Gauge(self._device)
            except PagingError:
                # Nothing tells when there is room again, so what was given back stays so.
                self._cap_bytes = self._limit()
                return
        self._gauge.look(self.held_bytes)
        room_bytes = self._gauge.room_bytes
        if self._cap_bytes is not None:
            # What it holds it may hold: a number was asked for.
            room_bytes = max(self._limit(), min(self._cap_bytes, room_bytes))
        if room_bytes < self._limit() or self._gauge.is_sure:
            self._limit_bytes = room_bytes

    def _ask(self, n_bytes: int, besides: Share | None = None) -> int:
        """Ask models for memory, those first that ran longest ago; what they gave back."""
        given_bytes = 0
        for share in self._alive():
            if share is not besides:
                given_bytes += share.give(n_bytes - given_bytes)
        return given_bytes

    def _alive(self) -> list[Share]:
        return [share for each in list(self._shares) if (share := each()) is not None]


@dataclass(frozen=True, slots=True)
class _Promise:
    """What a model is about to allocate, in the place of its room."""

    held_bytes: int
    lasting_bytes: int
    most_bytes: int = 0
    least_step_bytes: int = 0

    def take(self, n_bytes: int) -> int:
        return 0


class Share(Lease):
    """What one model has of a budget, and what it could give: the budget's side of an engine.

    Nothing here keeps a model or its pages alive; what is gone has nothing to give.

    Args:
        budget: the budget.
        promised_bytes: what it is about to allocate.

    Attributes:
        n_passes: how many it has run in its turn, or in its last one.
        turn: how many passes its last turn had before another model ran; None before the first.
    """

    def __init__(self, budget: PagingBudget, promised_bytes: int) -> None:
        self._budget, self._promise = budget, _Promise(promised_bytes, promised_bytes)
        self._engine: weakref.ref[Engine] | None = None
        self._giver: weakref.ref[Giver] | None = None
        self.n_passes = 0
        self.turn: int | None = None
        self._hidden_bytes: float | None = None

    @property
    def room(self) -> Room | _Promise:
        """What it has."""
        engine = None if self._engine is None else self._engine()
        return self._promise if engine is None else engine.room

    @property
    def others_bytes(self) -> int:
        """See `Lease`."""
        return self._budget.held_bytes - self.room.held_bytes

    @property
    def useful_bytes(self) -> int:
        """The bytes that hide its copies behind computation: more is no faster."""
        return max(self.room.lasting_bytes, int(self.room.most_bytes - (self._hidden_bytes or 0)))

    def serve(self, engine: Engine) -> None:
        """Be the lease of an engine, which has allocated what was promised."""
        self._engine = weakref.ref(engine)
        engine.room.lease = self

    def let_give(self, giver: Giver) -> None:
        """Let other models ask for memory from now on."""
        self._giver = weakref.ref(giver)

    def give(self, n_bytes: int) -> int:
        """Give memory back, as far as it can be done at once; how much."""
        giver = None if self._giver is None else self._giver()
        return 0 if giver is None or n_bytes <= 0 else giver.give_back(n_bytes)

    def begin(self) -> None:
        """See `Lease`."""
        self._measure()
        budget = self._budget
        with budget._lock:
            self.n_passes += 1
            last = budget._alive()[-1]
            if last is not self:
                last.turn, self.n_passes = last.n_passes or None, 1
                budget._leave(self)
                budget._shares.append(weakref.ref(self))
            budget._follow()
            if budget._left() < 0:
                budget._ask(-budget._left(), besides=self)
                budget._ask(-budget._left())
            else:
                self._grow()
            if budget._gauge is not None and budget._is_looking:
                budget._gauge.rebase()

    def look(self, *, goes_on: bool) -> None:
        """See `Lease`."""
        budget, gauge = self._budget, self._budget._gauge
        if gauge is None or not budget._follows:
            return
        # A look asks the driver and the allocator. Once passes repeat, one for a unit is enough.
        if goes_on and gauge.is_sure:
            return
        with budget._lock:
            held_bytes = budget.held_bytes
            gauge.look(held_bytes)
            short_bytes = gauge.short_bytes(held_bytes)
            if not short_bytes:
                return
            budget._ask(short_bytes - budget._ask(short_bytes, besides=self))
            if budget.held_bytes < held_bytes:
                budget._limit_bytes = min(budget._limit(), budget.held_bytes)
            gauge.rebase()

    def end(self) -> None:
        """See `Lease`."""
        gauge = self._budget._gauge
        if gauge is not None and self._budget._is_looking:
            with self._budget._lock:
                gauge.look(self._budget.held_bytes)
                gauge.end_pass()

    def gave_back(self) -> None:
        """See `Lease`; the memory is not taken again at once."""
        budget = self._budget
        with budget._lock:
            budget._limit_bytes = min(budget._limit(), budget.held_bytes)
            if budget._gauge is not None:
                budget._gauge.forget()

    def close(self) -> None:
        """See `Lease`; what it had is anybody's."""
        with self._budget._lock:
            self._budget._leave(self)

    def _grow(self) -> None:
        """Take what is its due, from others as well."""
        room, left = self.room, self._budget._left
        *others, _ = self._budget._alive()
        turn = self.n_passes if self.turn is None else max(self.turn, self.n_passes)
        is_long = self.turn is None or turn > _SHORT_TURN
        most_bytes = room.most_bytes if is_long else self.useful_bytes
        is_slow = self.useful_bytes - room.held_bytes >= room.least_step_bytes
        if 0 < room.least_step_bytes <= most_bytes - room.held_bytes:
            for each in others:
                missing_bytes = most_bytes - room.held_bytes - left()
                each.give(min(missing_bytes, each.room.held_bytes - each.useful_bytes))
                if is_slow and (is_long or turn > (each.turn or 0)):
                    missing_bytes = self.useful_bytes - room.held_bytes - left()
                    each.give(min(missing_bytes, each.room.held_bytes - each.room.lasting_bytes))
        room.take(left())

    def _measure(self) -> None:
        """Note what is copied while a pass computes, where a pass is known to be over."""
        engine = None if self._engine is None else self._engine()
        if engine is not None and len(self._budget._shares) > 1:
            # Once the host waits for it, or a program that never waits would never be measured.
            measured = engine.hidden_bytes(may_wait=self._hidden_bytes is None)
            self._hidden_bytes = self._hidden_bytes if measured is None else measured


def shared_budget(budget: object, device: torch.device) -> PagingBudget | None:
    """Return the budget if it is a changing one: all ``"auto"`` of a device share one."""
    if isinstance(budget, PagingBudget):
        return budget
    if budget != AUTO:
        return None
    with _autos_lock:
        return _autos.setdefault(str(device), PagingBudget(AUTO))
