"""Budgets that several models share, and the one that follows what is free on a device.

Invariant: what the models of a budget hold together never exceeds its limit, for nothing is taken
before it was given back. Nobody waits for another model here: one that runs on another thread is
left alone, and of one that runs on this thread goes only what is not in use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import RLock
from typing import NoReturn, TypeVar

import torch

from tenure._errors import PagingError
from tenure._text import counted, format_bytes, parse_bytes, parse_share

from ._gauge import Gauge
from ._policy import (
    AFTER_AN_ERROR,
    FIRST_SHARE,
    Ceiling,
    keeps,
    lowered,
    offered,
)
from ._share import Share

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
            return self._planned(plan, self._attainable(), self._left())

    def _join(
        self, device: torch.device, plan: _Plan[_Planned], size: Callable[[_Planned], int]
    ) -> tuple[_Planned, Share]:
        """The plan of another model, and its share, for which others give way as far as needed.

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
                left_bytes = self._left()
                planned = self._planned(plan, left_bytes, left_bytes)
            share = Share(self, size(planned))
            self._shares.append(weakref.ref(share))
            return planned, share

    def _planned(self, plan: _Plan[_Planned], most_bytes: int, now_bytes: int) -> _Planned:
        """What a plan makes of what others leave; its error says so."""
        try:
            return plan(most_bytes, now_bytes)
        except PagingError as error:
            if error.minimum_bytes is None or not self._alive():
                raise
            raise PagingError(
                f"{error} {format_bytes(most_bytes)} is what other models leave of {self!r}.",
                error.minimum_bytes,
            ) from None

    def _close(self, share: Share) -> None:
        """A model is gone; what it had is anybody's."""
        with self._lock:
            self._shares = [each for each in self._shares if each() not in (None, share)]

    def _begin(self, share: Share) -> None:
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

    def _look(self, share: Share, *, goes_on: bool) -> None:
        """A model is about to use a unit: is memory short?"""
        gauge = self._gauge
        if gauge is None or not self._follows:
            return
        # A look asks the driver and the allocator. Once passes repeat, one for a unit is enough.
        if goes_on and gauge.is_sure:
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

    def _end(self) -> None:
        """A pass of a model is over."""
        gauge = self._gauge
        if gauge is not None and self._is_looking:
            with self._lock:
                gauge.look(self._allocated_bytes())
                gauge.end_pass()

    def _more(self, share: Share, n_bytes: int) -> bool:
        """Whether a model that can't run without it may have so many bytes."""
        with self._lock:
            needed_bytes = n_bytes - self._left()
            if needed_bytes > 0:
                self._ask(needed_bytes, besides=share)
            return n_bytes <= self._left()

    def _gave_back(self) -> None:
        """One of the models had to give memory back."""
        with self._lock:
            if self._ceiling is not None:
                self._ceiling = lowered(self._ceiling, self.held_bytes, AFTER_AN_ERROR)

    @property
    def _is_shared(self) -> bool:
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


def shared_budget(budget: object, device: torch.device) -> PagingBudget | None:
    """The budget that is meant, where it is one that changes: all of ``"auto"`` share a device."""
    if isinstance(budget, PagingBudget):
        return budget
    if budget != AUTO:
        return None
    with _autos_lock:
        return _autos.setdefault(str(device), PagingBudget(AUTO))
