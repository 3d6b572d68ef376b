"""What a rank says in a vote, and what all said: one vector of one length for all calls.

Invariant: ranks in different calls combine vectors of the same length, so that they find it out
instead of waiting. Marks and sizes are compared as whole numbers of 64 bits: exactly, at any size.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from ._group import RankGroup

MOST_TERMS = 16
"""How many weights of terms a vote has room for."""
_N_COMPARED = 4
"""How many numbers of a vote are compared; the rest are summed up."""
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
    """The sums over all ranks; of ``mark``, and of the ``size`` where there are samples, the least.

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
    has_data = bool(ballot.n_with_data)
    # the least of a number and of its negative are the same number on all ranks, or not
    sizes = (ballot.size, -ballot.size) if has_data else (sys.maxsize, sys.maxsize)
    sums = (
        ballot.n_failed, ballot.n_early, ballot.n_with_data, ballot.n_samples, ballot.weight,
        ballot.n_missing, *ballot.weights,
    )  # fmt: skip
    # made at once: an operation that allocates could run out of memory when all have agreed
    bits = struct.unpack(f"{len(sums)}q", struct.pack(f"{len(sums)}d", *sums))
    numbers = [ballot.mark, -ballot.mark, *sizes, *bits]
    vector = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    group.vote(vector, _of_two)
    mark, less_mark, size, less_size = vector[:_N_COMPARED].tolist()
    failed, early, with_data, samples, weight, missing, *weights = (
        vector[_N_COMPARED:].view(torch.float64).tolist()
    )
    return Tally(
        mark=mark,
        n_failed=int(failed),
        n_early=int(early),
        n_with_data=int(with_data),
        n_samples=int(samples),
        weight=weight,
        n_missing=int(missing),
        size=size,
        weights=tuple(weights),
        is_one_call=mark == -less_mark,
        is_one_size=not with_data or size == -less_size,
    )


def _of_two(ours: Tensor, theirs: Tensor) -> Tensor:
    least = torch.minimum(ours[:_N_COMPARED], theirs[:_N_COMPARED])
    summed = ours[_N_COMPARED:].view(torch.float64) + theirs[_N_COMPARED:].view(torch.float64)
    return torch.cat([least, summed.view(torch.int64)])


def mark_of(*what: object) -> int:
    """A number for what is the same in two calls, and hardly ever in two others."""
    return zlib.crc32(repr(what).encode())
