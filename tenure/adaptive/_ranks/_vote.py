"""One vote: what a rank says, and what all say together, in one vector of one length for all calls.

Invariant: ranks in different calls combine vectors of the same length, so that they find it out
instead of waiting. Marks and sizes are compared as whole numbers of 64 bits: exactly, at any size.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._group import RankGroup

_N_COMPARED = 7
"""So many numbers of a vote are compared; the rest are summed up."""
MOST_TERMS = 16
"""A rank without samples has room for so many: it can't know how many terms the others have."""
_N_VALUES = 2 * (1 + MOST_TERMS)


@dataclass(frozen=True, slots=True)
class Ballot:
    """The vote of one rank; or, from `tally`, the votes of all ranks together.

    Attributes:
        mark: which call the rank is in: see `mark_of`; of all ranks the least.
        n_failed: 1 if the call has failed here.
        n_with_data: 1 if there are samples here.
        n_samples: how many.
        weight: what the mean over these divides by.
        n_missing: how many parameters have no gradient here.
        size: a number that ranks with samples have to say alike; of all ranks the least.
        shapes: a number that all ranks have to say alike, for the shapes of buffers.
        least: a number; of all ranks the least.
        values: numbers that are summed up.
        is_one_call: whether all are in the same call.
        is_one_size: whether all that have samples say the same ``size``.
        is_one_shape: whether all say the same ``shapes``.
    """

    mark: int = 0
    n_failed: int = 0
    n_with_data: int = 0
    n_samples: int = 0
    weight: float = 0.0
    n_missing: int = 0
    size: int = 0
    shapes: int = 0
    least: int = sys.maxsize
    values: Sequence[float] = ()
    is_one_call: bool = True
    is_one_size: bool = True
    is_one_shape: bool = True


def tally(group: RankGroup, ballot: Ballot) -> Ballot:
    """Vote; all ranks get the same.

    Raises:
        RemoteRankError: a rank has died, or did not come.
    """
    # the least of a number and of its negative are the same number on all ranks, or not
    sizes = (ballot.size, -ballot.size) if ballot.n_with_data else (sys.maxsize, sys.maxsize)
    mark, shapes = ballot.mark, ballot.shapes
    sums = (
        ballot.n_failed, ballot.n_with_data, ballot.n_samples, ballot.weight, ballot.n_missing,
        *ballot.values, *[0.0] * (_N_VALUES - len(ballot.values)),
    )  # fmt: skip
    # made at once: an operation that allocates could run out of memory when all have agreed
    bits = struct.unpack(f"{len(sums)}q", struct.pack(f"{len(sums)}d", *sums))
    numbers = [mark, -mark, *sizes, shapes, -shapes, ballot.least, *bits]
    vector = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    group.vote(vector, _of_two)
    mark, less_mark, size, less_size, shapes, less_shapes, least = vector[:_N_COMPARED].tolist()
    summed = vector[_N_COMPARED:].view(torch.float64).tolist()
    failed, with_data, samples, weight, missing, *values = summed
    return Ballot(
        mark=mark,
        n_failed=int(failed),
        n_with_data=int(with_data),
        n_samples=int(samples),
        weight=weight,
        n_missing=int(missing),
        size=size,
        shapes=shapes,
        least=least,
        values=values,
        is_one_call=mark == -less_mark,
        is_one_size=not with_data or size == -less_size,
        is_one_shape=shapes == -less_shapes,
    )


def _of_two(ours: Tensor, theirs: Tensor) -> Tensor:
    least = torch.minimum(ours[:_N_COMPARED], theirs[:_N_COMPARED])
    summed = ours[_N_COMPARED:].view(torch.float64) + theirs[_N_COMPARED:].view(torch.float64)
    return torch.cat([least, summed.view(torch.int64)])


def mark_of(*what: object) -> int:
    """Return a number for what is the same in two calls, and hardly ever in two others."""
    return zlib.crc32(repr(what).encode())
