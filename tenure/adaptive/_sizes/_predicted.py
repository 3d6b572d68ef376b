"""The largest size that a prediction says fits, in few predictions.

Invariant: every prediction narrows the sizes that are left, so that it comes to an end whatever is
predicted. One costs as much as running Python through the work, on tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable

Predict = Callable[[int], int]
"""The bytes that a size is predicted to need."""

_CLOSE = 100
"""A growth below one part in so many is not worth another prediction."""


def largest_predicted(
    bytes_at: Predict, low: int, high: int, limit_bytes: float, align: int = 1
) -> int:
    """The largest size whose prediction fits, or one that is less by 1 % at the most.

    Args:
        bytes_at: predicts; asked for ``high``, and for some sizes below it.
        low: the smallest size, a multiple of ``align``; the answer where no larger one fits.
        high: the largest, likewise.
        limit_bytes: what a size may need.
        align: sizes are multiples of it.
    """
    fits, fails = low // align, high // align + 1
    if fits + 1 >= fails or bytes_at(high) <= limit_bytes:
        return high if fits + 1 <= fails else low
    fails -= 1
    n_asked = 0
    while fails - fits > _close(fits):
        left, kind = fails - fits, n_asked % 3
        if kind == 0:
            # most memory is a fixed part and one in proportion: the line through both ends
            least_bytes, most_bytes = bytes_at(fits * align), bytes_at(fails * align)
            share = (limit_bytes - least_bytes) / max(1, most_bytes - least_bytes)
            n = fits + int(left * max(0.0, share))
        elif kind == 1:
            # where the line was right, this one ends it
            n = fits + _close(fits)
        else:
            n = (fits + fails) // 2
        n = min(max(n, fits + 1), fails - 1)
        if bytes_at(n * align) <= limit_bytes:
            fits = n
        else:
            fails = n
        n_asked += 1
    return max(low, fits * align)


def _close(n: int) -> int:
    return max(1, n // _CLOSE)
