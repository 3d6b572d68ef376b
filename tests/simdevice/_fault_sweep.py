"""The out-of-memory sweep: each allocation of a program fails once, the others succeed.

This is how SQLite tests every path out of a failed allocation (https://sqlite.org/malloc.html): the
first allocation fails, then the second, until the program runs through without meeting the failure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._simulator import Simulator


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """One run of a program with one allocation failing.

    Attributes:
        number: which allocation failed, from 1.
        error: what came out of the program, it and its causes without traceback; None if it coped.
        result: what the program returned; None if it raised.
    """

    number: int
    error: torch.OutOfMemoryError | None
    result: Any


def for_each_allocation(
    sim: Simulator,
    fn: Callable[[], Any],
    check: Callable[[AllocationFailure], None] | None = None,
    *,
    limit: int = 10_000,
) -> int:
    """Run `fn` with the 1st, 2nd, ... allocation failing, until it passes untouched.

    Args:
        sim: the simulated device.
        fn: the program; it runs once more than it has allocations.
        check: called after each run that met its failure, when its frames are gone.
        limit: the most runs to make.

    Returns:
        The number of failures that were met.

    Raises:
        AssertionError: `fn` still met a failure in the last of `limit` runs.
    """
    for number in range(1, limit + 1):
        failure = _run(sim, fn, number)
        if failure is None:
            return number - 1
        if check is not None:
            check(failure)
    raise AssertionError(f"{fn!r} still allocates after {limit} runs; raise limit= if it may.")


def _run(sim: Simulator, fn: Callable[[], Any], number: int) -> AllocationFailure | None:
    sim.fail_at(number)
    try:
        result, error = fn(), None
    except torch.OutOfMemoryError as raised:
        if sim.failure_is_planted:
            raise  # not ours: the budget is too small
        result, error = None, raised
        _let_go_of_frames(raised)
    except BaseException as raised:
        raised.add_note(f"raised while allocation {number} of {fn!r} was made to fail")
        raise
    finally:
        met = not sim.failure_is_planted
        sim.fail_at(None)
    return AllocationFailure(number, error, result) if met else None


def _let_go_of_frames(error: BaseException) -> None:
    """Drop the tracebacks, whose frames hold tensors, of an error and of all that led to it."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]
