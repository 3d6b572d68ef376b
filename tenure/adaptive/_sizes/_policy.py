"""Which size is worth a try: what measuring says of larger ones, and how far to go down blindly.

Everything here is a function of its arguments; what is known of a site is the record's, and what a
call has met so far is the search's. The table of docs/adaptive.md says the same in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MARGIN = 48
"""A size chosen by measuring is made smaller by one part in so many, for what rounding takes."""
COARSE = 20
"""Below this size one more counts for over 5 %: it is tried, unless it is known not to fit."""
_WORTH_IT = 100
"""A growth below one part in so many is not worth a new size."""
_LEAST_SLOPE = 0.5
"""At least so much of what a size needs grows with it, whatever two measurements say."""
_N_HALVED = 3
"""So many failures in a row are answered by half where the size stays what it comes to."""


class Measured(NamedTuple):
    """What a size needed.

    Attributes:
        size: the size.
        n_bytes: the most memory that was in use for it at once.
    """

    size: int
    n_bytes: int


def blind(size: int, n_failures: int, *, is_mended: bool) -> int:
    """The size after one that failed, where nothing tells how much it needed.

    A quarter where the call can measure it and go on with a larger one: 64 times too much is three
    failures. Else half, because a call that has one piece of work stays at the size that it comes
    to; failures that go on say that the size is far too large, and then it is a quarter there too.

    Args:
        size: the size that failed.
        n_failures: how many there were in this call, with this one.
        is_mended: whether this call can measure the size and go on with a larger one.
    """
    return size // (2 if n_failures <= _N_HALVED and not is_mended else 4)


def fitting(points: Sequence[Measured], free_bytes: int, *, is_steep: bool = False) -> int:
    """The largest size that fits into so much, by what one or two sizes needed.

    Memory is a fixed part and one that grows with the size. One measurement can't tell them apart,
    so there the fixed part counts as nothing, which is the careful guess for larger sizes.

    Args:
        points: the measured sizes, the latest last.
        free_bytes: what there is.
        is_steep: whether the memory may grow with the square of the size.
    """
    power = 2 if is_steep else 1
    size, n_bytes = points[-1]
    level = size**power
    slope = n_bytes / level
    if len(points) > 1 and points[0].size < size:
        earlier = points[0]
        more_bytes: float = n_bytes - earlier.n_bytes
        if free_bytes > n_bytes and size >= COARSE:
            # measurements vary: two sizes that lie close tell little of what lies far
            more_bytes += n_bytes / _MARGIN
        measured = max(slope * _LEAST_SLOPE, more_bytes / (level - earlier.size**power))
        slope = measured if free_bytes > n_bytes else min(slope, measured)
    reached = level + (free_bytes - n_bytes) / slope
    return int(max(0.0, reached) ** (1 / power) + 1e-9)


def calling_for(failures: Sequence[Measured], free_bytes: int) -> int:
    """The size whose request fits, by what sizes that failed have asked for at once.

    One is taken to grow with the size; two show whether it grows faster.

    Args:
        failures: one or two sizes that failed, and the bytes that they wanted, the latest last.
        free_bytes: what there is.
    """
    size, wanted_bytes = failures[-1]
    power = 1.0
    if len(failures) > 1 and failures[0].size > size:
        earlier = failures[0]
        grown = math.log(max(1.0, earlier.n_bytes / wanted_bytes))
        power = min(2.0, max(1.0, grown / math.log(earlier.size / size)))
    return int(size * min(1.0, free_bytes / wanted_bytes) ** (1 / power) + 1e-9)


def with_margin(size: int) -> int:
    """A size that measuring says fits, as one that surely does."""
    return size - size // _MARGIN


def short_of(bad: int, ok: int, wanted: int, align: int) -> int:
    """A size below one that failed in no less memory than there is now.

    Where measuring says that what failed fits, it doesn't see all: so much as it promised for more
    may fail as well, and the middle is what to try.
    """
    if wanted < bad:
        return min(wanted, bad - align)
    return (ok + bad) // 2


def is_worth_it(size: int, larger: int) -> bool:
    """Whether it is worth a new size."""
    return larger - size > size // _WORTH_IT
