"""Which sizes may be tried at all: not too small, not too large, and in whole steps.

Invariant: a size below a failed one is smaller than it, a multiple of ``align``, and not below
``minimum``; where no such size is left, the answer is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

from tenure._errors import AdaptiveUsageError


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """The sizes that a call allows.

    Attributes:
        minimum: no smaller size is tried.
        maximum: no larger size is tried; None: none larger than the initial one.
        align: sizes are multiples of it, except an initial size that is smaller than ``align``.
    """

    minimum: int = 1
    maximum: int | None = None
    align: int = 1

    @property
    def floor(self) -> int:
        """The smallest size that may be tried."""
        return -(-self.minimum // self.align) * self.align

    def first(self, initial: int) -> int:
        """Return the size to begin with where nothing is known."""
        return self.aligned(initial if self.maximum is None else min(initial, self.maximum))

    def ceiling(self, initial: int) -> int:
        """Return the largest size that may be tried."""
        return self.aligned(initial if self.maximum is None else self.maximum)

    def below(self, failed: int, wanted: int) -> int | None:
        """Return the allowed size nearest to ``wanted`` below ``failed``, or None.

        Args:
            failed: the size that failed.
            wanted: any number, also one that is not allowed.
        """
        # a multiple below what failed, whatever was wanted: that is what makes each search end
        largest = (failed - 1) // self.align * self.align
        if largest < self.floor:
            return None
        return max(self.floor, min(largest, wanted // self.align * self.align))

    def in_the_way_below(self, failed: int) -> str:
        """Return the arguments that leave no size below one that failed, as errors name them."""
        names = ["minimum="] if failed <= self.minimum else []
        names += ["align="] if failed <= self.align else []
        return " and ".join(names) or "minimum= or align="

    def aligned(self, size: int) -> int:
        """Return the largest size in whole steps; a size below one step stays."""
        # a batch that is smaller than a step has to be run, too
        return size // self.align * self.align or size


def checked_limits(minimum: int, maximum: int | None, align: int) -> SizeLimits:
    """Return the limits that a user gave.

    Raises:
        AdaptiveUsageError: one is no whole number from 1 up, or they leave no size.
    """
    limits = SizeLimits(
        checked_size("minimum", minimum),
        None if maximum is None else checked_size("maximum", maximum),
        checked_size("align", align),
    )
    if limits.maximum is not None and limits.maximum < limits.floor:
        raise AdaptiveUsageError(
            f"maximum={maximum} leaves no size: the smallest allowed is {limits.floor}, by "
            f"minimum={minimum} and align={align}. Raise the maximum."
        )
    return limits


def checked_size(name: str, size: object) -> int:
    """Return a number of things to do at once.

    Raises:
        AdaptiveUsageError: it is no whole number from 1 up.
    """
    try:
        number = index(size)  # type: ignore[arg-type]  # it raises TypeError, as it should
    except TypeError:
        number = 0
    if number < 1 or isinstance(size, bool):
        raise AdaptiveUsageError(f"{name}={size!r} is not a size. Give a whole number from 1 up.")
    return number


def checked_initial(name: str, initial: int | None, limits: SizeLimits) -> int | None:
    """Return the size to begin with; without one the largest that is allowed, or None.

    Raises:
        AdaptiveUsageError: it is no size, or no size is allowed from the minimum up to it.
    """
    if initial is None:
        return limits.maximum
    initial = checked_size(name, initial)
    if initial < limits.minimum:
        raise AdaptiveUsageError(
            f"{name}={initial} is below minimum={limits.minimum}. Raise it, or lower the minimum."
        )
    if limits.first(initial) < limits.minimum:
        raise AdaptiveUsageError(
            f"{name}={initial} leaves no size: the smallest allowed is {limits.floor}, by "
            f"minimum={limits.minimum} and align={limits.align}. Raise it, or lower the minimum."
        )
    return initial
