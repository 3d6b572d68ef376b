"""The out-of-memory sweep: each allocation of a program fails once, the others succeed.

This is how SQLite tests every path out of a failed allocation (https://sqlite.org/malloc.html): the
first allocation fails, then the second, until the program runs through without meeting the failure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tenure._errors import SimulatorUsageError
from tenure._oom import chain_of
from tenure._show import steps

from ._simulated_accelerator import running_simulator
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
    # which may be all that a model gives
    result: Any = field(repr=False)


def for_each_allocation(
    fn: Callable[[], Any],
    check: Callable[[AllocationFailure], None] | None = None,
    *,
    index: int = 0,
    max_runs: int = 10_000,
) -> int:
    """Run `fn` with its 1st, 2nd, ... allocation on the device failing, until it passes untouched.

    An error of `fn` that is no `torch.OutOfMemoryError` comes out, with a note that says which
    allocation had failed.

    Args:
        fn: the program; it runs once more than it has allocations, and must be repeatable.
        check: called after each run that met its failure, when its frames are gone.
        index: of the device whose allocations fail.
        max_runs: the most runs to make.

    Returns:
        The number of failures that were met, 1 or more.

    Raises:
        SimulatorUsageError: no simulated accelerator is running, `fn` allocates nothing on the
            device, a failure is planted there already (by a call around this one, say), or `fn` or
            `check` can't be called.
        AssertionError: `fn` still met a failure in the last of `max_runs` runs.

    Example:
        >>> import torch
        >>> from tenure.testing import for_each_allocation, simulated_accelerator
        >>> def add_one(totals):
        ...     totals += 1
        ...     return (totals * 2).tolist()  # fails when totals is no longer what it was
        >>> with simulated_accelerator() as sim:
        ...     totals = torch.zeros(2, device=sim.device)
        ...     seen = []
        ...     count = for_each_allocation(
        ...         lambda: add_one(totals), lambda failure: seen.append(totals.tolist())
        ...     )
        >>> count, seen
        (1, [[1.0, 1.0]])
    """
    sim = _ready(fn, check, index)
    with steps("for_each_allocation") as show:
        for number in range(1, max_runs + 1):
            show(f"allocation {number} fails")
            failure = _run(sim, fn, number)
            if failure is None and number == 1:
                raise SimulatorUsageError(
                    f"{fn!r} allocated nothing on {sim.device}, so no allocation of it could fail"
                    f" and nothing was tested. {_what_to_use(sim)}"
                )
            if failure is None:
                return number - 1
            if check is not None:
                check(failure)
    raise AssertionError(
        f"{fn!r} still allocates after {max_runs} runs; raise max_runs= if it may."
    )


def _ready(fn: object, check: object, index: int) -> Simulator:
    for name, given in (("fn", fn), ("check", check or _run)):
        if not callable(given):
            raise SimulatorUsageError(
                f"for_each_allocation({name}={given!r}): it can't be called. Give a function, not"
                " what it returns."
            )
    sim = running_simulator("for_each_allocation()").on(index)
    if sim.failure_is_planted:
        raise SimulatorUsageError(
            f"for_each_allocation() found a failure planted on {sim.device} already, by fail_at()"
            " or by a call of for_each_allocation() around this one, and would take it away. Take"
            " it back with fail_at(None), or run the two one after the other."
        )
    return sim


def _what_to_use(sim: Simulator) -> str:
    n_devices = sim.module.device_count()
    if n_devices == 1:
        return "Let it use sim.device."
    return f"Let it use {sim.device}, or choose another of the {n_devices} devices with index=."


def _run(sim: Simulator, fn: Callable[[], Any], number: int) -> AllocationFailure | None:
    sim.fail_at(number)
    try:
        result, error = fn(), None
    except torch.OutOfMemoryError as raised:
        if sim.failure_is_planted:
            # This one was not planted: the budget is too small.
            raise
        result, error = None, raised
        # Their frames hold tensors.
        for one in chain_of(raised):
            one.__traceback__ = None
    except BaseException as raised:
        raised.add_note(f"raised while allocation {number} of {fn!r} was made to fail")
        raise
    finally:
        met = not sim.failure_is_planted
        sim.fail_at(None)
    return AllocationFailure(number, error, result) if met else None
