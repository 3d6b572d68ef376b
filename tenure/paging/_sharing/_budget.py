"""Budgets that several models share, and the one that follows what is free on a device.

Invariant: what the models of a budget hold together never exceeds its limit, for nothing is taken
before it was given back. Nobody waits for another model here: one that runs on another thread is
left alone, and of one that runs on this thread goes only what is not in use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import RLock
from typing import Protocol, TypeVar

import torch

from tenure._errors import PagingError
from tenure._text import counted, format_bytes, parse_bytes, parse_share

from .._device import Engine, Lease, Room
from ._gauge import Gauge
from ._policy import (
    AFTER_AN_ERROR,
    ASSUMED_TURN,
    FIRST_SHARE,
    Ceiling,
    Demand,
    keeps,
    lowered,
    offered,
)

AUTO = "auto"
_autos: weakref.WeakValueDictionary[str, PagingBudget] = weakref.WeakValueDictionary()
_autos_lock = RLock()
_Planned = TypeVar("_Planned")
_Plan = Callable[[int, int], _Planned]
"""Of the bytes that it may have, and of those that nothing has now."""


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
        self._ceiling: Ceiling | None = None
        self._shares: list[weakref.ref[Share]] = []
        self._n_turns = 0

    @property
    def limit_bytes(self) -> int | None:
        """What the models may have together now; None before the first one is paged."""
        with self._lock:
            return self._cap_bytes if self._ceiling is None else self._ceiling.n_bytes

    @property
    def held_bytes(self) -> int:
        """What they have together."""
        with self._lock:
            return sum(share.held_bytes for share in self._alive())

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

    def fitted(self, device: torch.device, plan: _Plan[_Planned]) -> _Planned:
        """The plan of another model, without anything being done for it.

        Args:
            device: where.
            plan: makes it.

        Raises:
            PagingError: the budget belongs to another device, or this one can't tell what is free,
                or the plan does not fit.
        """
        with self._lock:
            self._come_to(device)
            return plan(self._attainable(), self._left())

    def join(
        self, device: torch.device, plan: _Plan[_Planned], size: Callable[[_Planned], int]
    ) -> tuple[_Planned, Share]:
        """The plan of another model, and its share, for which others give way as far as needed.

        Args:
            device: where.
            plan: makes it.
            size: what a plan allocates at first.

        Raises:
            PagingError: as of ``fitted``.
        """
        with self._lock:
            planned = self.fitted(device, plan)
            self._ask(size(planned) - self._left())
            if size(planned) > self._left():
                # Those that run give nothing.
                left_bytes = self._left()
                planned = plan(left_bytes, left_bytes)
            share = Share(self, size(planned))
            self._shares.append(weakref.ref(share))
            return planned, share

    def close(self, share: Share) -> None:
        """A model is gone; what it had is anybody's."""
        with self._lock:
            self._shares = [each for each in self._shares if each() not in (None, share)]

    def begin(self, share: Share) -> None:
        """A pass of a model begins."""
        with self._lock:
            self._note_turn(share)
            self._follow()
            over_bytes = -self._left()
            if over_bytes > 0:
                self._ask(over_bytes, besides=share)
                self._ask(-self._left())
            elif self._ceiling is not None and self._ceiling.is_calm:
                self._grow(share)
            self._rebase()

    def look(self, share: Share) -> None:
        """A model is about to use a unit: is memory short?"""
        gauge = self._gauge
        if gauge is None or not self._follows:
            return
        with self._lock:
            allocated_bytes = self._allocated_bytes()
            gauge.look(allocated_bytes)
            wanted_bytes = gauge.short_bytes(allocated_bytes)
            if not wanted_bytes:
                return
            before_bytes = self.held_bytes
            wanted_bytes -= self._ask(wanted_bytes, besides=share)
            if wanted_bytes > 0:
                self._ask(wanted_bytes)
            if self.held_bytes < before_bytes and self._ceiling is not None:
                self._ceiling = lowered(self._ceiling, self.held_bytes)
            self._rebase()

    def end(self) -> None:
        """A pass of a model is over."""
        gauge = self._gauge
        if gauge is not None and self._is_looking:
            with self._lock:
                gauge.look(self._allocated_bytes())
                gauge.end_pass()

    def more(self, share: Share, n_bytes: int) -> bool:
        """Whether a model that can't run without it may have so many bytes."""
        with self._lock:
            needed_bytes = n_bytes - self._left()
            if needed_bytes > 0:
                self._ask(needed_bytes, besides=share)
            return n_bytes <= self._left()

    def gave_back(self) -> None:
        """One of the models had to give memory back."""
        with self._lock:
            if self._ceiling is not None:
                self._ceiling = lowered(self._ceiling, self.held_bytes, AFTER_AN_ERROR)

    @property
    def is_shared(self) -> bool:
        """Whether several models have it."""
        return len(self._shares) > 1

    @property
    def _is_looking(self) -> bool:
        """Whether what is free matters: always, or until what was given back is taken again."""
        return self._follows or self._limit() < (self._cap_bytes or 0)

    def _limit(self) -> int:
        assert self._ceiling is not None
        return self._ceiling.n_bytes

    def _left(self) -> int:
        """What nothing has; less than none where the limit has fallen."""
        return self._limit() - self.held_bytes

    def _attainable(self) -> int:
        """What another model might have, if all others gave what they can."""
        return self._left() + sum(share.givable_bytes for share in self._alive())

    def _come_to(self, device: torch.device) -> None:
        """Belong to a device, and know what there is, where this is the first model there."""
        shares = self._alive()
        if shares and device != self._device:
            raise PagingError(
                f"{self!r} can't be used on {device} as well. Make another PagingBudget for the "
                "models of that device."
            )
        if shares:
            return
        self._device, self._gauge = device, None
        if self._asked_bytes is None:
            self._gauge = Gauge(device)
            free_bytes = self._gauge.free_bytes(0)
            if self._asked_share is None:
                self._ceiling = Ceiling(int(free_bytes * FIRST_SHARE))
                return
            self._cap_bytes = int(free_bytes * self._asked_share)
        self._ceiling = Ceiling(self._cap_bytes or 0)

    def _follow(self) -> None:
        """Have the limit follow what is free."""
        if not self._is_looking or self._ceiling is None or self._device is None:
            return
        if self._gauge is None:
            try:
                self._gauge = Gauge(self._device)
            except PagingError:
                # Nothing tells when there is room again, so what was given back stays so.
                self._cap_bytes = self._limit()
                return
        self._gauge.look(self._allocated_bytes())
        room_bytes = self._gauge.room_bytes
        if room_bytes is None:
            return
        if self._cap_bytes is not None:
            # What it holds it may hold: a number was asked for.
            room_bytes = max(self._limit(), min(self._cap_bytes, room_bytes))
        self._ceiling = offered(self._ceiling, max(0, room_bytes))

    def _grow(self, share: Share) -> None:
        """Have the model that runs take what is its due, from others as well."""
        shares = self._alive()
        kept = keeps(
            [each.demand(self._n_turns) for each in shares], shares.index(share), self._limit()
        )
        wanted_bytes = kept[shares.index(share)] - share.held_bytes
        step_bytes = share.step_bytes
        if not step_bytes or wanted_bytes < step_bytes:
            return
        others = [
            (each, each.held_bytes - least)
            for each, least in zip(shares, kept, strict=True)
            if each is not share and each.held_bytes > least
        ]
        if self._left() + sum(n_bytes for _, n_bytes in others) < step_bytes:
            return
        for each, n_bytes in sorted(others, key=lambda pair: pair[0].last_turn):
            missing_bytes = wanted_bytes - self._left()
            if missing_bytes > 0:
                each.give(min(n_bytes, missing_bytes))
        share.take(min(wanted_bytes, self._left()))

    def _ask(self, n_bytes: int, besides: Share | None = None) -> int:
        """Ask models for memory, those first that ran longest ago; what they gave back."""
        given_bytes = 0
        for share in sorted(self._alive(), key=lambda each: each.last_turn):
            if share is not besides and given_bytes < n_bytes:
                given_bytes += share.give(n_bytes - given_bytes)
        return given_bytes

    def _note_turn(self, share: Share) -> None:
        shares = self._alive()
        last = max(shares, key=lambda each: each.last_turn)
        if last is not share or not share.last_turn:
            if last is not share:
                last.end_turn()
            self._n_turns += 1
        share.note_pass(self._n_turns)

    def _rebase(self) -> None:
        if self._gauge is not None and self._is_looking:
            self._gauge.rebase()

    def _allocated_bytes(self) -> int:
        return sum(share.allocated_bytes for share in self._alive())

    def _alive(self) -> list[Share]:
        return [share for each in list(self._shares) if (share := each()) is not None]


class Giver(Protocol):
    """Who lets a model's units go, where nothing uses them."""

    def give_back(self, n_bytes: int) -> int:
        """Give back so many bytes, or what there is, without waiting; how many."""
        ...


class Share(Lease):
    """What one model has of a budget.

    Args:
        budget: the budget.
        promised_bytes: what it is about to allocate.

    Attributes:
        last_turn: the number of its last turn; 0 before the first.
    """

    def __init__(self, budget: PagingBudget, promised_bytes: int) -> None:
        self._budget, self._promised_bytes = budget, promised_bytes
        self._engine: weakref.ref[Engine] | None = None
        self._giver: weakref.ref[Giver] | None = None
        self._beside_bytes = 0
        self.last_turn = 0
        self._n_passes = 0
        self._turn: int | None = None
        self._hidden_bytes: float | None = None

    def serve(self, engine: Engine, beside_bytes: int) -> None:
        """Be the lease of an engine, which has allocated what was promised.

        Args:
            engine: the pages.
            beside_bytes: what is allocated beside them.
        """
        self._engine, self._beside_bytes = weakref.ref(engine), beside_bytes
        engine.room.lease = self

    def let_give(self, giver: Giver) -> None:
        """From now on others may ask for memory."""
        self._giver = weakref.ref(giver)

    def begin(self) -> None:
        """See `Lease`."""
        self._measure()
        self._budget.begin(self)

    def look(self) -> None:
        """See `Lease`."""
        self._budget.look(self)

    def end(self) -> None:
        """See `Lease`."""
        self._budget.end()

    def more(self, n_bytes: int) -> bool:
        """See `Lease`."""
        return self._budget.more(self, n_bytes)

    def gave_back(self) -> None:
        """See `Lease`."""
        self._budget.gave_back()

    def close(self) -> None:
        """See `Lease`."""
        self._budget.close(self)

    @property
    def held_bytes(self) -> int:
        """What it has, and what it may take at once."""
        room = self._room
        return self._promised_bytes if room is None else self._beside_bytes + room.held_bytes

    @property
    def allocated_bytes(self) -> int:
        """What it has allocated."""
        room = self._room
        return 0 if room is None else self._beside_bytes + sum(room.slab_sizes)

    @property
    def givable_bytes(self) -> int:
        """What it could do without, if nothing of it were in use."""
        room = self._room
        return 0 if room is None else room.held_bytes - room.lasting_bytes

    @property
    def step_bytes(self) -> int:
        """The least that it can take at a time; 0 where it has all."""
        room = self._room
        return 0 if room is None else room.least_step_bytes

    def demand(self, n_turns: int) -> Demand:
        """What is known of its model, after so many turns of all."""
        room, beside_bytes = self._room, self._beside_bytes
        is_new = self._turn is None and self._n_passes <= ASSUMED_TURN
        return Demand(
            least_bytes=beside_bytes + (0 if room is None else room.lasting_bytes),
            held_bytes=self.held_bytes,
            most_bytes=beside_bytes + (0 if room is None else room.most_bytes),
            hidden_bytes=self._hidden_bytes or 0.0,
            turn=None if is_new else max(self._turn or 0, self._n_passes),
            n_turns_ago=n_turns - self.last_turn,
        )

    def note_pass(self, n_turns: int) -> None:
        """A pass begins in the turn of this number."""
        if self.last_turn != n_turns:
            self._n_passes = 0
        self.last_turn = n_turns
        self._n_passes += 1

    def end_turn(self) -> None:
        """Another model has its turn now."""
        if self.last_turn:
            self._turn = self._n_passes

    def give(self, n_bytes: int) -> int:
        """Give memory back, as far as it can be done at once; how much."""
        giver = None if self._giver is None else self._giver()
        return 0 if giver is None else giver.give_back(n_bytes)

    def take(self, n_bytes: int) -> None:
        """Have more units stay, in so many bytes at most."""
        if self._room is not None:
            self._room.take(n_bytes)

    @property
    def _room(self) -> Room | None:
        engine = None if self._engine is None else self._engine()
        return None if engine is None else engine.room

    def _measure(self) -> None:
        """Note what is copied while a pass computes, where a pass is known to be over."""
        engine = None if self._engine is None else self._engine()
        if engine is None or not self._budget.is_shared:
            return
        # Once the host waits for it, or a program that never waits would never be measured.
        measured = engine.hidden_bytes(may_wait=self._hidden_bytes is None)
        if measured is not None:
            self._hidden_bytes = measured


def shared_budget(budget: object, device: torch.device) -> PagingBudget | None:
    """The budget that is meant, where it is one that changes: all of ``"auto"`` share a device."""
    if isinstance(budget, PagingBudget):
        return budget
    if budget != AUTO:
        return None
    with _autos_lock:
        return _autos.setdefault(str(device), PagingBudget(AUTO))
