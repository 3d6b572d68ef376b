"""Which sizes are evaluated, until the largest that fits is known."""

from __future__ import annotations

from collections.abc import Callable

_HALVED = 4
"""Each time that so many sizes are known, the next one is halfway, in case memory is no line."""


def largest_that_fits(
    fewest: int, most: int, fits: Callable[[int], bool], excess: Callable[[int], float]
) -> int:
    """The largest size that fits, of those between which nothing else does; 0 where none does.

    From the largest down, by the line through the two that were asked last, but to no less than the
    half, as long as the line comes to a size that fits. Not from below: small sizes take the
    longest to evaluate, and may take more memory, where each micro-batch leaves something.

    Args:
        fewest: the smallest size.
        most: the largest.
        fits: whether a size fits.
        excess: the bytes that a size that was asked for takes beyond what there is, or below 0.

    Example:
        >>> asked = []
        >>> fits = lambda size: asked.append(size) or size <= 300
        >>> largest_that_fits(1, 1000, fits, lambda size: size - 300.0)
        300
        >>> asked
        [1000, 500, 300, 301]
    """
    if most < fewest:
        return 0
    known: dict[int, float] = {}

    def has_room(size: int) -> bool:
        fitted = fits(size)
        known[size] = excess(size)
        return fitted

    above, size = most + 1, most
    while not has_room(size):
        if size == fewest:
            return 0
        above, half, reached = size, max(size // 2, fewest), _reached(known)
        if reached is None or reached >= fewest:
            size = min(max(reached or half, half), size - 1)
        else:
            # memory is convex in the size: where a line has nothing that fits, nothing does; the
            # whole batch is no point of it, because it needs no gradients beside its own
            size = fewest if len(known) > 2 else half
    while above - size > 1:
        reached = _reached(known) if len(known) % _HALVED else None
        middle = (size + above) // 2 if reached is None else reached
        middle = min(max(middle, size + 1), above - 1)
        if has_room(middle):
            size = middle
        else:
            above = middle
    return size


def _reached(known: dict[int, float]) -> int | None:
    """The largest size that fits by the line through the last two; None where it tells nothing."""
    if len(known) < 2:
        return None
    (size, bytes_over), (other, others_over) = list(known.items())[-2:]
    slope = (bytes_over - others_over) / (size - other)
    return int(other - others_over / slope) if slope > 0 else None
