"""Which sizes are evaluated, until the largest that fits is known."""

from __future__ import annotations

from collections.abc import Callable


def largest_that_fits(fewest: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest size that fits, of those between which nothing else does; 0 where none does.

    The first that fits of the largest, its half, its quarter and so on, and then halfway to the one
    above. Not from below: small sizes take the longest to evaluate, and may take more memory, where
    each micro-batch leaves something. ``fits`` is asked ``log2(most) + 2`` times at the most.

    Example:
        >>> asked = []
        >>> largest_that_fits(1, 1000, lambda size: asked.append(size) or size <= 300)
        300
        >>> asked
        [1000, 500, 250, 375, 312, 281, 296, 304, 300, 302, 301]
    """
    if most < fewest:
        return 0
    above, size = most + 1, most
    while not fits(size):
        if size == fewest:
            return 0
        above, size = size, max(size // 2, fewest)
    while above - size > 1:
        middle = (size + above) // 2
        if fits(middle):
            size = middle
        else:
            above = middle
    return size
