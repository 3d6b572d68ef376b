"""The largest size that a prediction says fits, in few predictions, from the largest down.

Invariant: every prediction narrows the sizes that are left, so that it comes to an end whatever is
predicted. One costs as much as running Python through the work, on tensors without data; and small
sizes of work that is cut up cost most, so that they are asked for last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tenure._show import steps

Predict = Callable[[int], int]
"""The bytes that a size is predicted to need."""


class Foresight(Protocol):
    """Predicts sizes, as far as it can."""

    @property
    def works(self) -> bool:
        """Whether all predictions so far succeeded."""
        ...

    def __call__(self, size: int) -> int:
        """Return the bytes that a size is predicted to need."""
        ...


_MARGIN = 48
"""A size that is computed is made smaller by one part in so many, for what rounding takes."""
_CLOSE = 100
"""A growth below one part in so many is not worth another prediction."""
_MOST_MISSED = 2
"""So often a line may have missed, before the sizes that are left are halved."""
_HALVED = 5
"""So often they are halved whatever the line has told, in case that what is predicted is none."""
_FAR = 4
"""Sizes that lie so many times apart are halved by their ratio, and others by their difference."""


class Foreseen(NamedTuple):
    """What predictions come to.

    Attributes:
        size: the size to run.
        each_bytes: what one more needs; None where only one size could be asked.
    """

    size: int
    each_bytes: float | None


def foreseen(
    predict: Foresight, low: int, high: int, free_bytes: int, align: int = 1
) -> Foreseen | None:
    """Return the predicted size to run: the largest that fits, less a margin.

    Args:
        predict: predicts.
        low: the smallest size, a multiple of ``align``.
        high: the largest.
        free_bytes: what there is.
        align: sizes are multiples of it.

    Returns:
        A size; None where one could not be predicted.
    """
    known: dict[int, int] = {}

    def bytes_at(size: int) -> int:
        show(f"size {size}")
        known[size] = predict(size)
        return known[size]

    with steps("predictions") as show:
        size = high
        if bytes_at(high) > free_bytes and predict.works:
            top = high // align * align or high
            most = largest_predicted(bytes_at, low, top, free_bytes, align)
            size = max(low, with_margin(most) // align * align)
        # work that is not cut up is other work
        if sum(each < high for each in known) < 2 and low < size and predict.works:
            bytes_at(max(low, size // 2))
    # one that failed tells nothing, and nothing that was told with it counts
    return Foreseen(size, _slope(known)) if predict.works else None


def _slope(known: dict[int, int]) -> float | None:
    (more, more_bytes), (less, less_bytes) = max(known.items()), min(known.items())
    parts = {size: n_bytes for size, n_bytes in known.items() if size < more}
    if len(parts) > 1:
        (more, more_bytes), (less, less_bytes) = max(parts.items()), min(parts.items())
    return (more_bytes - less_bytes) / (more - less) if less < more else None


def largest_predicted(
    bytes_at: Predict,
    low: int,
    high: int,
    limit_bytes: float,
    align: int = 1,
    *,
    is_exact: bool = False,
) -> int:
    """Return the largest size whose prediction fits, or one that is less by 1 % at the most.

    Args:
        bytes_at: predicts; asked for ``high``, and for some sizes below it.
        low: the smallest size, a multiple of ``align``; the answer where no larger one fits.
        high: the largest, likewise.
        limit_bytes: what a size may need.
        align: sizes are multiples of it.
        is_exact: whether it has to be the largest.
    """

    def close(n: int) -> int:
        return 1 if is_exact else max(1, n // _CLOSE)

    fits, fails = low // align, high // align + 1
    if fits + 1 >= fails:
        return low
    known: dict[int, int] = {}

    def is_fitting(n: int) -> bool:
        known[n] = bytes_at(n * align)
        return known[n] <= limit_bytes

    fails -= 1
    if is_fitting(fails):
        return high
    n_asked, n_missed, has_met = 0, 0, False
    while fails - fits > close(fits):
        n_asked += 1
        is_by_line = not has_met and n_missed < _MOST_MISSED and n_asked % _HALVED != 0
        if is_by_line:
            # a curve is above the line that continues it, so that all by the line may fail
            n = min(_reaching(limit_bytes, known), fails - close(fails))
        else:
            # where the line was right, one more step ends it
            n = fits + close(fits) if has_met else _middle(fits, fails)
        n = min(max(n, fits + 1), fails - 1)
        if is_fitting(n):
            fits, n_missed, has_met = n, 0, is_by_line
        else:
            fails, n_missed, has_met = n, n_missed + 1 if is_by_line else 0, False
    return max(low, fits * align)


def _reaching(limit_bytes: float, known: dict[int, int]) -> int:
    """Return the size at which a line through the last two reaches so much."""
    (n, n_bytes), *before = reversed(known.items())
    # most memory is a fixed part and one in proportion: one prediction can't tell them apart
    less, less_bytes = before[0] if before else (0, 0)
    if n_bytes == less_bytes:
        return n
    return int(n + (limit_bytes - n_bytes) * (n - less) / (n_bytes - less_bytes))


def _middle(fits: int, fails: int) -> int:
    far = fails > _FAR * max(1, fits)
    return int((max(1, fits) * fails) ** 0.5) if far else (fits + fails) // 2


def with_margin(size: int) -> int:
    """Return a size that measuring or predicting says fits, as one that surely does."""
    return size - size // _MARGIN
