"""The largest size that a prediction says fits, in few predictions, from the largest down.

Invariant: every prediction narrows the sizes that are left, so that it comes to an end whatever is
predicted. One costs as much as running Python through the work, on tensors without data; and small
sizes of work that is cut up cost most, so that they are asked for last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tenure._show import steps

from .._predict import Forecast
from ._model import with_margin

Predict = Callable[[int], int]
"""The bytes that a size is predicted to need."""


_CLOSE = 100
"""A growth below one part in so many is not worth another prediction."""


class Foreseen(NamedTuple):
    """The size to run, and the bytes of one more; None where only one size could be asked."""

    size: int
    each_bytes: float | None


def foreseen(
    predict: Forecast, low: int, high: int, free_bytes: int, align: int = 1
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
    parts = dict(sorted(known.items())[:-1])
    (more, more_bytes) = max((parts if len(parts) > 1 else known).items())
    (less, less_bytes) = min(known.items())
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

    fits, fails = low // align, high // align
    if fits >= fails:
        return low
    n, n_bytes = fails, bytes_at(high)
    if n_bytes <= limit_bytes:
        return high
    less = less_bytes = turn = 0
    while fails - fits > close(fits):
        turn += 1
        if turn % 3 and n_bytes != less_bytes:
            # a line through the last two: most memory is a fixed part and one in proportion
            reached = int(n + (limit_bytes - n_bytes) * (n - less) / (n_bytes - less_bytes))
        else:
            # sizes that lie far apart are halved by their ratio
            is_far = fails > 4 * max(1, fits)
            reached = int((max(1, fits) * fails) ** 0.5) if is_far else (fits + fails) // 2
        less, less_bytes = n, n_bytes
        # A curve is above the line that continues it, so that all by the line may fail. Where the
        # line was right, one step more ends it.
        n = max(fits + close(fits), min(reached, fails - close(fails)))
        n_bytes = bytes_at(n * align)
        fits, fails = (n, fails) if n_bytes <= limit_bytes else (fits, n)
    return max(low, fits * align)
