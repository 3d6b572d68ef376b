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
    is_middle = False
    while fails - fits > max(1, fits // _CLOSE):
        if is_middle:
            n = (fits + fails) // 2
        else:
            # most memory is a fixed part and one in proportion: the line through both ends
            least_bytes, most_bytes = bytes_at(fits * align), bytes_at(fails * align)
            rise = max(1, most_bytes - least_bytes)
            n = fits + int((fails - fits) * max(0.0, limit_bytes - least_bytes) / rise)
        n = min(max(n, fits + 1), fails - 1)
        left = fails - fits
        if bytes_at(n * align) <= limit_bytes:
            fits = n
        else:
            fails = n
        # a line that cuts off little, of memory that is none
        is_middle = not is_middle and 2 * (fails - fits) > left
    return max(low, fits * align)
