"""How much memory weights may have, and which model of several has it; numbers in, numbers out.

What a device leaves for weights is looked at pass by pass, and the ceiling follows it: down at
once, up only when several passes in a row have had room for more. Each time that going up turns out
to have been too early, the next time takes longer.

Models that take turns under one ceiling are divided by what a round of turns would take. Of a byte
that stays while a model runs, each pass but the first of its turn has no copy; of one that stays
for good, each pass has none. So models whose turns are long take the memory from each other, and
those whose turns are short keep what they have, as far as it hides their copies.

Invariant: in a pass that gives memory back none is taken, and no model is asked for what it has to
have at the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

PATIENCE = 3
"""So many passes must have had room for more before more is taken."""
AFTER_AN_ERROR = 16
"""The same after memory had to be given back for work that had failed."""
_MOST_PATIENCE = 96
_PROVEN_AFTER = 8
"""Times the patience: so long nothing may have to be given back for going up to have been right."""
_STEP_SHARE = 1 / 64
MARGIN_SHARE = 1 / 32
"""Of the device's memory: what is left free beside what computation was seen to need."""
FIRST_SHARE = 3 / 4
"""Of what is free: what weights have before the first pass has shown what computation needs."""
ASSUMED_TURN = 4
"""Passes of a turn of a model that had none yet."""
_GONE_AFTER_TURNS = 8
_WORTH_MOVING = 0.97


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What weights may have, all told.

    Attributes:
        n_bytes: the bytes.
        offers: what the last passes had room for, since it last changed.
        patience: how many of them it takes to go up.
        is_new: whether it went up, and too few passes since then have proved it right.
        n_since: the passes since it went up.
        n_calm: the passes since it went down.
    """

    n_bytes: int
    offers: tuple[int, ...] = ()
    patience: int = PATIENCE
    is_new: bool = False
    n_since: int = 0
    n_calm: int = PATIENCE

    @property
    def is_calm(self) -> bool:
        """Whether memory may be taken, up to it: not while it goes down from pass to pass."""
        return self.n_calm >= PATIENCE


def offered(ceiling: Ceiling, n_bytes: int) -> Ceiling:
    """The ceiling once a pass has had room for so many bytes of weights."""
    n_since, n_calm = ceiling.n_since + 1, ceiling.n_calm + 1
    if n_bytes < ceiling.n_bytes:
        # It went up for nothing: that cost copies, and must not go on for ever.
        was_early = ceiling.is_new and n_since <= _PROVEN_AFTER * ceiling.patience
        patience = min(2 * ceiling.patience, _MOST_PATIENCE) if was_early else ceiling.patience
        return Ceiling(n_bytes, patience=patience, n_calm=0)
    offers = (*ceiling.offers, n_bytes)[-ceiling.patience :]
    least_bytes = min(offers)
    is_worth_it = least_bytes - ceiling.n_bytes > least_bytes * _STEP_SHARE
    if len(offers) < ceiling.patience or not is_worth_it:
        has_held = ceiling.is_new and n_since > _PROVEN_AFTER * ceiling.patience
        patience = PATIENCE if has_held else ceiling.patience
        is_new = ceiling.is_new and not has_held
        return Ceiling(ceiling.n_bytes, offers, patience, is_new, n_since, n_calm)
    return Ceiling(least_bytes, patience=ceiling.patience, is_new=True, n_calm=n_calm)


def lowered(ceiling: Ceiling, n_bytes: int, patience: int = PATIENCE) -> Ceiling:
    """The ceiling when all but so many bytes had to be given back in the middle of something."""
    least = min(2 * ceiling.patience, _MOST_PATIENCE) if ceiling.is_new else ceiling.patience
    return Ceiling(min(n_bytes, ceiling.n_bytes), patience=max(least, patience), n_calm=0)


def margin_bytes(total_bytes: int, rooms: Sequence[int]) -> int:
    """What is left free for what no look has seen, and for what is more in the next pass.

    Args:
        total_bytes: of the device.
        rooms: what the last passes had room for. Where it is less and less, as where a cache grows,
            the next one will have less, too; one jump, or two kinds of passes, tell nothing.
    """
    half = len(rooms) // 2
    if not half:
        return int(total_bytes * MARGIN_SHARE)
    typical = median(max(0, before - after) for before, after in pairwise(rooms))
    lasting = (min(rooms[:half]) - min(rooms[half:])) / half
    growth = 2 * max(0, min(typical, lasting))
    return max(int(total_bytes * MARGIN_SHARE), int(growth))


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of one of several models.

    Attributes:
        least_bytes: what it has to have.
        held_bytes: what it has.
        most_bytes: what it has when all of it stays.
        hidden_bytes: what is copied in the time that a pass of it computes; 0 where unknown.
        turn: how many passes it runs before another model does; None before its first turn is over.
        n_turns_ago: how many turns others had since its last one.
    """

    least_bytes: int
    held_bytes: int
    most_bytes: int
    hidden_bytes: float = 0
    turn: int | None = None
    n_turns_ago: int = 0

    @property
    def weight(self) -> int:
        """By how much its passes count."""
        if self.n_turns_ago > _GONE_AFTER_TURNS:
            return 0
        return ASSUMED_TURN if self.turn is None else self.turn

    @property
    def helpful_bytes(self) -> int:
        """What it takes for copies to be hidden behind computation: more is no faster."""
        return int(min(max(self.least_bytes, self.most_bytes - self.hidden_bytes), self.most_bytes))

    def cost(self, n_bytes: int) -> float:
        """How long a pass takes that begins with so many bytes, in bytes over the link."""
        return max(self.most_bytes - n_bytes, self.hidden_bytes)


def keeps(demands: Sequence[Demand], runs: int, limit_bytes: int) -> list[int]:
    """Up to what each model is to have memory while one of them runs.

    Args:
        demands: of all models.
        runs: which of them runs.
        limit_bytes: for all of them.

    Returns:
        For the one that runs, what it may grow to; for the others, what they are not asked for.
    """
    fixed, tops = _for_good(demands, limit_bytes), _in_turn(demands, limit_bytes)
    cost_for_good = sum(
        each.weight * each.cost(share) for each, share in zip(demands, fixed, strict=True)
    )
    if not _cost_in_turn(demands, tops, limit_bytes) < cost_for_good * _WORTH_MOVING:
        return fixed
    kept = [each.least_bytes for each in demands]
    kept[runs] = tops[runs]
    return kept


def _for_good(demands: Sequence[Demand], limit_bytes: int) -> list[int]:
    """The shares with which a round is shortest, if none of them ever changes."""
    shares = [each.least_bytes for each in demands]
    left = max(0, limit_bytes - sum(shares))
    # Each byte spares one copy a pass, up to where copies are hidden.
    order = sorted(range(len(demands)), key=lambda i: (-demands[i].weight, -demands[i].held_bytes))
    for wanted in ("helpful_bytes", "most_bytes"):
        for i in order:
            grown = min(left, max(0, getattr(demands[i], wanted) - shares[i]))
            shares[i] += grown
            left -= grown
    return shares


def _in_turn(demands: Sequence[Demand], limit_bytes: int) -> list[int]:
    """What each has while it runs, if the others give way."""
    least = sum(each.least_bytes for each in demands)
    return [
        max(each.least_bytes, min(each.helpful_bytes, limit_bytes - least + each.least_bytes))
        for each in demands
    ]


def _cost_in_turn(demands: Sequence[Demand], tops: Sequence[int], limit_bytes: int) -> float:
    """How long a round takes in which each model has the memory while it runs."""
    cost = 0.0
    for i, each in enumerate(demands):
        others = sum(top for j, top in enumerate(tops) if j != i)
        left_bytes = min(max(each.least_bytes, limit_bytes - others), tops[i])
        if each.weight:
            cost += each.cost(left_bytes) + (each.weight - 1) * each.cost(tops[i])
    return cost
