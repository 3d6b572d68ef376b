"""Which size to try next: `start` of a call, `smaller` after a failure, `larger` where one fits.

Each is a function of what is known of a site (a `SizeRecord`, at one moment), of what happened, and
of the memory that is free. The table of docs/adaptive.md says the same in words, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._limits import SizeLimits
from ._record import CLOSED_INTERVAL, Measured, SizeRecord

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
_MANY_FAILURES = 3
"""A call that has met so many goes up carefully: no other size should fail."""
_LITTLE = 8
"""What worked before and fails is made smaller by one part in so many, at least."""
_RISE_BYTES = 1 << 28
"""Memory that came free has to be so much to count, where nothing tells what a size needs."""


class Failure(NamedTuple):
    """An attempt that ran out of memory, as far as the next size depends on it.

    Attributes:
        size: the size that failed.
        n_failures: how many there were in this call, with this one.
        is_first: whether it is the first since work returned, or since the call began.
        free_bytes: what is free of that memory with the attempt let go; None: nobody can tell.
        wanted_bytes: what the allocation that failed asked of that memory; 0: it does not say.
        is_measured: whether that memory can tell what work needs.
    """

    size: int
    n_failures: int
    is_first: bool
    free_bytes: int | None
    wanted_bytes: int = 0
    is_measured: bool = False


# --- a call begins


def start(known: SizeRecord, first: int, ceiling: int, align: int) -> int:
    """The size that a call begins with, by what worked; without regard to the memory that is free.

    Args:
        known: what is known of the site.
        first: the size where nothing is known.
        ceiling: the largest that is allowed.
        align: sizes are multiples of it.
    """
    if _is_larger_than_known(known, first):
        return first
    if is_due(known, ceiling):
        return _grown(known, ceiling, align)
    if known.ok:
        return min(known.ok, ceiling)
    if known.bad is None or first < known.bad:
        return first
    return min(first, max(align, known.bad // 2 // align * align))


def climbs(known: SizeRecord, first: int, ceiling: int) -> bool:
    """Whether a call begins with a size above the one that works, for a try."""
    return is_due(known, ceiling) and not _is_larger_than_known(known, first)


def is_due(known: SizeRecord, ceiling: int) -> bool:
    """Whether a size above the one that works is worth the risk now."""
    # measuring tells what fits: to try more is only for what it may not see
    interval = max(known.interval, CLOSED_INTERVAL) if known.points else known.interval
    is_rested = known.climbing or known.n_clean >= interval
    return is_rested and 0 < known.ok < ceiling


def _is_larger_than_known(known: SizeRecord, first: int) -> bool:
    """Whether a size is above all that were tried: nothing speaks against it yet."""
    return known.bad is None and not known.climbing and known.ok < first


def _grown(known: SizeRecord, ceiling: int, align: int) -> int:
    if known.bad is None:
        wanted = 2 * known.ok
    # what failed may have been a last piece, which is no multiple
    else:
        wanted = min(-(-known.bad // align) * align, known.ok + known.step(align))
    return min(ceiling, max(wanted, known.ok + 1))


def has_risen(known: SizeRecord, free_bytes: int) -> bool:
    """Whether so much more memory is free than when a size failed that it may fit now."""
    then_bytes = known.free_bytes
    if then_bytes is None:
        return False
    return free_bytes - then_bytes > max(_RISE_BYTES, then_bytes // 8)


def again(
    known: SizeRecord, size: int, free_bytes: int, limits: SizeLimits, ceiling: int, n_failures: int
) -> int:
    """The size instead of one that works, by what was measured and what is free now.

    Args:
        known: what is known of the site, with what sizes needed.
        size: the size that would be tried otherwise.
        free_bytes: what there is.
        limits: the sizes that are allowed.
        ceiling: the largest of them.
        n_failures: how many there were in this call.
    """
    ok = min(known.ok, ceiling)
    fits = fitting(known.points, serving(known, free_bytes), is_steep=known.is_steep)
    if fits < size <= ok:
        # memory has gone, for the state of an optimizer, results that pile up, another program
        return limits.below(size, with_margin(fits)) or size
    if limits.aligned(ok) <= size < ceiling:
        return larger(known, ok, free_bytes, limits.align, ceiling, n_failures) or size
    return size


def serving(known: SizeRecord, free_bytes: int) -> int:
    """What serves the size that works, of which less may be told to be free than it had.

    What lies free between tensors of before is not told, and part of the work fits there. So what
    ``ok`` needs was there when it began, and only what went since then is missing.
    """
    if known.least_free_bytes is None or not known.points:
        return free_bytes
    return max(free_bytes, known.points[-1].n_bytes + free_bytes - known.least_free_bytes)


# --- it worked


def larger(
    known: SizeRecord, size: int, free_bytes: int, align: int, ceiling: int, n_failures: int
) -> int | None:
    """The largest size that surely fits, if it is worth a new size.

    Args:
        known: what is known of the site, with what sizes needed.
        size: the size that works.
        free_bytes: what there is.
        align: sizes are multiples of it.
        ceiling: the largest that is allowed.
        n_failures: how many there were in this call.
    """
    step = known.step(align)
    fits = with_margin(fitting(known.points, free_bytes))
    if known.is_steep or n_failures >= _MANY_FAILURES:
        careful = with_margin(fitting(known.points, free_bytes, is_steep=True))
        # Where there is room for two steps, one fits whatever the memory grows with. Without it a
        # small size would stay: of 2, the careful view of twice the memory is 2.
        fits = max(careful, size + step) if fits >= size + 2 * step else careful
    bad = fails_at(known, free_bytes)
    # what was measured does not say what fits here, and enough has failed for that
    if known.is_steep and known.n_failed >= _MANY_FAILURES and bad is not None and bad <= fits:
        return None
    if bad is not None:
        fits = short_of(bad, size, fits, step)
    fits = min(fits // align * align, ceiling)
    return fits if fits - size > size // _WORTH_IT else None


def is_largest(known: SizeRecord, free_bytes: int) -> bool:
    """Whether measuring tells that the size that works is as large as fits.

    Of large ones that no larger is worth a try; of small ones, where one more is over 5 %, that one
    more is known not to fit.
    """
    if known.ok >= COARSE:
        return True
    if not known.points:
        return False
    *earlier, (size, n_bytes) = known.points
    slopes = [(n_bytes - less_bytes) / (size - less) for less, less_bytes in earlier]
    return n_bytes + max([*slopes, 0]) > free_bytes


def fails_at(known: SizeRecord, free_bytes: int) -> int | None:
    """The size that is to fail in so much memory: ``bad``, or more where more is free now.

    None where nobody knows.
    """
    if known.is_guess:
        return None
    if known.bad is None or not known.free_bytes:
        return known.bad
    return max(known.bad, known.bad * free_bytes // known.free_bytes)


def short_of(bad: int, ok: int, wanted: int, align: int) -> int:
    """A size below one that failed in no less memory than there is now.

    Where measuring says that what failed fits, it doesn't see all: so much as it promised for more
    may fail as well, and the middle is what to try.
    """
    if wanted < bad:
        return min(wanted, bad - align)
    return (ok + bad) // 2


# --- it failed


def smaller(
    known: SizeRecord,
    failure: Failure,
    *,
    is_mended: bool,
    reduced: Callable[[int], int] | None = None,
) -> int:
    """The size to try after one that failed, before it is made one that is allowed.

    Args:
        known: what was known before.
        failure: what failed.
        is_mended: whether this call can measure the size and go on with a larger one.
        reduced: the user's answer to a size that failed.
    """
    size, free_bytes = failure.size, failure.free_bytes
    if 0 < known.ok < size:
        if not known.points or free_bytes is None or reduced is not None:
            return known.ok
        return min(known.ok, with_margin(fitting(known.points, free_bytes)))
    if reduced is not None:
        return reduced(size)
    if free_bytes is None:
        return size // 2
    # it worked before, so that not much is missing
    if known.points and failure.is_first:
        fits = with_margin(fitting(known.points, free_bytes))
        return min(fits, size - -(-size // _LITTLE))
    wanted = size // 2
    if failure.is_measured:
        wanted = blind(size, failure.n_failures, is_mended=is_mended)
    if failure.wanted_bytes > free_bytes:
        # what is asked for at once is taken to grow with the size
        wanted = min(wanted, size * free_bytes // failure.wanted_bytes)
    return wanted


def is_blind(known: SizeRecord, failure: Failure) -> bool:
    """Whether nothing was known of what failed but the error itself."""
    if failure.free_bytes is None or 0 < known.ok < failure.size:
        return False
    return not (known.points and failure.is_first)


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
    # 1/2 1/4 1/8, then 1/32 1/128: the first run of `batch` keeps half of the largest size from 8
    # times too much, and comes to a quarter from 60 times with five failures at the most. Halving
    # on would cost six, quartering at once would lose half of what fits from 2 times too much. See
    # test_the_first_call_of_one_piece_comes_to_no_less_than_a_quarter, and the test before it.
    return size // (2 if n_failures <= _N_HALVED and not is_mended else 4)


# --- what fits


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
    # With one point the line goes through nothing at size 0: the fixed part counts as growing.
    slope = n_bytes / level
    if len(points) > 1 and points[0].size < size:
        earlier = points[0]
        more_bytes: float = n_bytes - earlier.n_bytes
        if free_bytes > n_bytes and size >= COARSE:
            # measurements vary: two sizes that lie close tell little of what lies far
            more_bytes += n_bytes / _MARGIN
        measured = max(slope * _LEAST_SLOPE, more_bytes / (level - earlier.size**power))
        # down, the flatter of both lines takes more away, which is the careful way
        slope = measured if free_bytes > n_bytes else min(slope, measured)
    reached = level + (free_bytes - n_bytes) / slope
    if reached < 1:
        # Not even nothing would fit: what two sizes share is then not needed by all, as where an
        # allocator rounds both up to one segment. A failure costs less than the smallest size.
        reached = level * free_bytes / n_bytes
    return int(max(0.0, reached) ** (1 / power) + 1e-9)


def with_margin(size: int) -> int:
    """A size that measuring says fits, as one that surely does."""
    return size - size // _MARGIN
