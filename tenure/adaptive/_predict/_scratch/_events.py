"""What a real kernel allocates and frees, in order.

It runs on a thread of its own: no mode, no autocast, no profiler and no graph of the program is
there, and none has to be put away and brought back. Random numbers are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any

import torch

from tenure._torch.allocations import begin, end

Events = tuple[int, ...]
"""Bytes allocated (positive) and freed (negative), in order."""


def peak_of(events: Iterable[int]) -> int:
    """The most bytes that are live at once, of those that the events tell of."""
    live = peak = 0
    for n_bytes in events:
        live += n_bytes
        peak = max(peak, live)
    return peak


def events_of(func: Any, make: Callable[[], tuple[Any, dict[str, Any]]]) -> Events | Exception:
    """Run an operation on tensors that ``make`` gives, and tell what it does to host memory.

    Returns:
        Its events; or the error that it raised, or that ``make`` raised.
    """
    seen: list[Events | Exception] = []

    def run() -> None:
        try:
            seen.append(_run(func, make))
        # any error only says that this can't be measured
        except Exception as error:
            seen.append(error)

    thread = Thread(target=run, name="tenure-measure", daemon=True)
    thread.start()
    thread.join()
    return seen[0]


def _run(func: Any, make: Callable[[], tuple[Any, dict[str, Any]]]) -> Events:
    # only who asks for it gets the program's number of threads on a thread of its own
    torch.get_num_threads()
    draws = torch.Tag.nondeterministic_seeded in func.tags
    state = torch.random.get_rng_state() if draws else None
    changes = None
    try:
        with torch.no_grad():
            args, kwargs = make()
            begin()
            try:
                kept = func(*args, **kwargs)
            finally:
                changes = end()
            del kept
    finally:
        if state is not None:
            torch.random.set_rng_state(state)
    if changes is None:
        raise RuntimeError("another profiler ended the session in which a kernel was measured")
    return tuple(changes.cpu)
