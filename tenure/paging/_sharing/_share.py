"""What one model has of a budget, and what it could give: the budget's side of an engine.

Invariant: nothing here keeps a model or its pages alive; what is gone has nothing to give.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from .._device import Engine, Lease, Room

if TYPE_CHECKING:
    from ._budget import PagingBudget


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
        n_passes: how many it has run in its turn, or in its last one.
        turn: how many passes its last turn had before another model ran; None before the first.
    """

    def __init__(self, budget: PagingBudget, promised_bytes: int) -> None:
        self._budget, self._promised_bytes = budget, promised_bytes
        self._engine: weakref.ref[Engine] | None = None
        self._giver: weakref.ref[Giver] | None = None
        self._beside_bytes = 0
        self.n_passes = 0
        self.turn: int | None = None
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
        self._budget._begin(self)

    def look(self, *, goes_on: bool) -> None:
        """See `Lease`."""
        self._budget._look(self, goes_on=goes_on)

    def end(self) -> None:
        """See `Lease`."""
        self._budget._end()

    def more(self, n_bytes: int) -> bool:
        """See `Lease`."""
        return self._budget._more(self, n_bytes)

    def gave_back(self) -> None:
        """See `Lease`."""
        self._budget._gave_back()

    def close(self) -> None:
        """See `Lease`."""
        self._budget._close(self)

    @property
    def others_bytes(self) -> int:
        """See `Lease`."""
        return self._budget.held_bytes - self.held_bytes

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
    def least_bytes(self) -> int:
        """The bytes that it can't do without."""
        room = self._room
        return self.held_bytes if room is None else self._beside_bytes + room.lasting_bytes

    @property
    def useful_bytes(self) -> int:
        """The bytes that hide its copies behind computation: more is no faster."""
        return max(self.least_bytes, int(self.most_bytes - (self._hidden_bytes or 0)))

    @property
    def most_bytes(self) -> int:
        """The bytes that it has when all of it stays."""
        room = self._room
        return 0 if room is None else self._beside_bytes + room.most_bytes

    @property
    def step_bytes(self) -> int:
        """The least that it can take at a time; 0 where it has all."""
        room = self._room
        return 0 if room is None else room.least_step_bytes

    def give(self, n_bytes: int) -> int:
        """Give memory back, as far as it can be done at once; how much."""
        giver = None if self._giver is None else self._giver()
        return 0 if giver is None or n_bytes <= 0 else giver.give_back(n_bytes)

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
        if engine is None or len(self._budget._shares) < 2:
            return
        # Once the host waits for it, or a program that never waits would never be measured.
        measured = engine.hidden_bytes(may_wait=self._hidden_bytes is None)
        if measured is not None:
            self._hidden_bytes = measured
