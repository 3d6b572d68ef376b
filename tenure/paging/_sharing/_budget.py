"""Budgets that several models share, and the one that follows what is free on a device.

The model that runs takes memory from the others, from the one first that ran longest ago. In the
first pass after that all of it is copied anew; so a model whose turns are short takes only what no
copy of another one needs, or what one has whose turns are shorter still.

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
from ._share import Share

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
            # If all others gave what they can.
            givable_bytes = sum(each.held_bytes - each.least_bytes for each in self._alive())
            return self._planned(plan, self._left() + givable_bytes, self._left())

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
                planned = self._planned(plan, self._left(), self._left())
            share = Share(self, size(planned))
            self._shares.insert(0, weakref.ref(share))
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
            share.n_passes += 1
            last = self._alive()[-1]
            if last is not share:
                last.turn, share.n_passes = last.n_passes or None, 1
                self._close(share)
                self._shares.append(weakref.ref(share))
            self._follow()
            if self._left() < 0:
                self._ask(-self._left(), besides=share)
                self._ask(-self._left())
            else:
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
            held_bytes, allocated_bytes = self.held_bytes, self._allocated_bytes()
            gauge.look(allocated_bytes)
            short_bytes = gauge.short_bytes(allocated_bytes)
            if not short_bytes:
                return
            self._ask(short_bytes - self._ask(short_bytes, besides=share))
            if self.held_bytes < held_bytes:
                self._limit_bytes = min(self._limit(), self.held_bytes)
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
            self._ask(n_bytes - self._left(), besides=share)
            return n_bytes <= self._left()

    def _gave_back(self) -> None:
        """One of the models had to give memory back: it is not taken again at once."""
        with self._lock:
            self._limit_bytes = min(self._limit(), self.held_bytes)
            if self._gauge is not None:
                self._gauge.forget()

    @property
    def _is_looking(self) -> bool:
        """Whether what is free matters: always, or until what was given back is taken again."""
        return self._follows or self._limit() < (self._cap_bytes or 0)

    def _limit(self) -> int:
        assert self._limit_bytes is not None
        return self._limit_bytes

    def _left(self) -> int:
        """What nothing has; less than none where the limit has fallen."""
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
            self._limit_bytes = int(self._gauge.free_bytes() * share)
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
        self._gauge.look(self._allocated_bytes())
        room_bytes = self._gauge.room_bytes
        if self._cap_bytes is not None:
            # What it holds it may hold: a number was asked for.
            room_bytes = max(self._limit(), min(self._cap_bytes, room_bytes))
        if room_bytes < self._limit() or self._gauge.is_sure:
            self._limit_bytes = room_bytes

    def _grow(self, share: Share) -> None:
        """Have the model that runs take what is its due, from others as well."""
        *others, _ = self._alive()
        turn = share.n_passes if share.turn is None else max(share.turn, share.n_passes)
        is_long = share.turn is None or turn > _SHORT_TURN
        most_bytes = share.most_bytes if is_long else share.useful_bytes
        is_slow = share.useful_bytes - share.held_bytes >= share.step_bytes
        if 0 < share.step_bytes <= most_bytes - share.held_bytes:
            for each in others:
                missing_bytes = most_bytes - share.held_bytes - self._left()
                each.give(min(missing_bytes, each.held_bytes - each.useful_bytes))
                if is_slow and (is_long or turn > (each.turn or 0)):
                    missing_bytes = share.useful_bytes - share.held_bytes - self._left()
                    each.give(min(missing_bytes, each.held_bytes - each.least_bytes))
        share.take(self._left())

    def _ask(self, n_bytes: int, besides: Share | None = None) -> int:
        """Ask models for memory, those first that ran longest ago; what they gave back."""
        given_bytes = 0
        for share in self._alive():
            if share is not besides:
                given_bytes += share.give(n_bytes - given_bytes)
        return given_bytes

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
