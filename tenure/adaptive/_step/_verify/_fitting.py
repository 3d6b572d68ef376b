"""Work of a verification: it may fail, and the step goes on.

Invariant: a verification never runs the step out of memory, and no error of it reaches the user but
an interrupt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from tenure.scopes import DisposeScope

from ..._attempt import release
from ..._oom import oom_of_work

T = TypeVar("T")


def first_that_fits(work: Callable[[int], T], sizes: Iterable[int]) -> T | None:
    """The work at the first size that fits; None if it fits at none, or can't be done.

    What a try that ran out of memory made is let go. What another leaves in a cache of the user's
    stays, as it would after a step.
    """
    outside = sys.exception()
    for size in sizes:
        failure: Exception | None = None
        with DisposeScope("verification of step") as scope:
            try:
                result = work(size)
            except Exception as error:
                failure = error
            else:
                if made := scope.owned():
                    scope.move_to_outer(made)
                return result
            info = oom_of_work(failure, outside)
            release(failure, outside)
        failure = None
        if info is None or not info.retry_safe:  # a function that can't run on so few samples
            return None
    return None
