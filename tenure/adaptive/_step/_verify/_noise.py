"""Which differences are noise: those that rounding a little worse makes as well.

Invariant: a difference is noise only where rougher rounding makes more of it. What crosses a
threshold, such as which sample is the hardest, is as far off with one rounding as with many, and
hides what a split changes.
"""

from __future__ import annotations

from collections.abc import Callable

_ROUNDINGS = 16
"""How much farther than one more rounding of each operation two kernels may be apart."""
_ROUGHER = 8
_LEAST_GROWTH = 2


def is_noise(error: float, noise: Callable[[int], float]) -> bool:
    """Whether a difference is one of rounding, or of what the function draws unseen.

    Args:
        error: how far the parts are off.
        noise: how far the whole is off from itself with so many more roundings of each operation;
            with none of them, from a second run.
    """
    if error <= _ROUNDINGS * noise(0):
        return True
    rough = noise(1)
    return error <= _ROUNDINGS * rough and noise(_ROUGHER) >= _LEAST_GROWTH * rough
