"""What a rank says in a vote, and the sum of what all said: one vector of one length for all calls.

Invariant: ranks in different calls sum up vectors of the same length, so that they find it out
instead of waiting; sums of whole numbers are exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field

import torch

from tenure._errors import AdaptiveUsageError

from ._group import RankGroup

MOST_TERMS = 16
"""How many weights of terms a vote has room for."""
_MARK_BITS = 20
_NO_WEIGHTS = (0.0,) * MOST_TERMS


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank says.

    Attributes:
        mark: which call it is in: see `mark_of`.
        n_failed: 1 if the call has failed here.
        n_early: 1 if weights of terms are asked for, and nothing has run yet.
        n_with_data: 1 if there are samples here.
        n_samples: how many.
        weight: what the mean over these divides by.
        n_missing: how many parameters have got no gradient here.
        size: of the batch that was tried; with weights of terms the mark of their names.
        weights: weights of terms, ``MOST_TERMS`` of them.
    """

    mark: int = 0
    n_failed: int = 0
    n_early: int = 0
    n_with_data: int = 0
    n_samples: int = 0
    weight: float = 0.0
    n_missing: int = 0
    size: int = 0
    weights: tuple[float, ...] = field(default=_NO_WEIGHTS, repr=False)


@dataclass(frozen=True, slots=True)
class Tally(Ballot):
    """The sums over all ranks, and what they say.

    Attributes:
        is_one_call: whether all are in the same call.
        is_one_size: whether all that have samples say the same size.
    """

    is_one_call: bool = True
    is_one_size: bool = True


def weights_of(values: Iterable[float], told: str) -> tuple[float, ...]:
    """The weights of a ballot: those of some terms, and zeros for the rest of its room.

    Args:
        values: one for each term.
        told: what gave them, as an error begins with.

    Raises:
        AdaptiveUsageError: a vote has no room for so many.
    """
    weights = tuple(values)
    refuse_many_terms(len(weights), told)
    return (*weights, *(0.0,) * (MOST_TERMS - len(weights)))


def refuse_many_terms(n_terms: int, told: str) -> None:
    """Make sure that ranks can agree on so many terms: a longer vote would meet none of the others.

    Raises:
        AdaptiveUsageError: they can't.
    """
    if n_terms > MOST_TERMS:
        raise AdaptiveUsageError(
            f"{told} {n_terms} terms, and ranks can agree on {MOST_TERMS} at most. Nothing was "
            "changed. Return fewer terms."
        )


def tally(group: RankGroup, ballot: Ballot) -> Tally:
    """Vote.

    Raises:
        RemoteRankError: a rank has died, or did not come.
    """
    *numbers, weights = astuple(ballot)
    squares = [ballot.mark**2, ballot.size**2]
    vector = torch.tensor([*numbers, *squares, *weights], dtype=torch.float64, device="cpu")
    group.vote(vector)
    summed = vector.tolist()
    n = len(numbers)
    mark, failed, early, with_data, samples, weight, missing, size = summed[:n]
    marks, sizes = map(int, summed[n : n + 2])
    return Tally(
        mark=int(mark),
        n_failed=int(failed),
        n_early=int(early),
        n_with_data=int(with_data),
        n_samples=int(samples),
        weight=weight,
        n_missing=int(missing),
        size=int(size),
        weights=tuple(summed[n + 2 :]),
        # only equal numbers have as large a square of their sum: Cauchy and Schwarz
        is_one_call=group.size * marks == int(mark) ** 2,
        is_one_size=int(with_data) * sizes == int(size) ** 2,
    )


def mark_of(*what: object) -> int:
    """A number for what is the same in two calls, and hardly ever in two others.

    Below 2 ** 20, so that the sum of the squares of thousands is exact in float64.
    """
    return zlib.crc32(repr(what).encode()) & ((1 << _MARK_BITS) - 1)
