"""Run a kernel on made-up tensors, and note what it allocates and what it returns.

It runs on a thread of its own: no mode, no autocast, no profiler and no graph of the program is
there. Random numbers are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, NamedTuple

import torch

from tenure._containers import passed_tensors
from tenure._torch.allocations import begin, end
from tenure._torch.storages import key_of

from ._layouts import Layout, layout_of


class KernelRun(NamedTuple):
    """One call of a kernel.

    Attributes:
        events: bytes allocated (positive) and freed (negative), in order.
        made: the layouts of the tensors that it returned; None for memory that it was given, or
            that an earlier one of them has.
        made_bytes: the bytes of their storages.
        is_grown: whether it is told from smaller problems.
    """

    events: tuple[int, ...]
    made: tuple[Layout | None, ...]
    made_bytes: tuple[int, ...]
    is_grown: bool = False


def peak_of(events: Iterable[int]) -> int:
    """Return the most bytes that are live at once."""
    live = peak = 0
    for n_bytes in events:
        live += n_bytes
        peak = max(peak, live)
    return peak


def run(func: Any, make: Callable[[], tuple[Any, dict[str, Any]]], threads: int) -> KernelRun:
    """Run an operation on the tensors that ``make`` returns, on so many threads.

    Raises:
        Exception: whatever the kernel or ``make`` raised.
    """
    seen: list[KernelRun | Exception] = []
    grad = torch.is_grad_enabled()

    def target() -> None:
        try:
            # some kernels keep more for a backward pass
            with torch.set_grad_enabled(grad), _on_threads(threads):
                seen.append(_run(func, make))
        except Exception as error:
            seen.append(error)

    thread = Thread(target=target, name="tenure-measure", daemon=True)
    thread.start()
    thread.join()
    outcome = seen.pop()
    if not isinstance(outcome, Exception):
        return outcome
    try:
        raise outcome
    finally:
        # or its frames would keep the made-up tensors, and these count as the work's, until the
        # next collection of garbage
        del outcome


@contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    # a new thread takes over the program's number only when it is asked for
    before = torch.get_num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(func: Any, make: Callable[[], tuple[Any, dict[str, Any]]]) -> KernelRun:
    draws = torch.Tag.nondeterministic_seeded in func.tags
    state = torch.random.get_rng_state() if draws else None
    try:
        args, kwargs = make()
        begin()
        try:
            result = func(*args, **kwargs)
        finally:
            changes = end()
    finally:
        if state is not None:
            torch.random.set_rng_state(state)
    if changes is None:
        raise RuntimeError("another profiler ended the session in which a kernel was measured")
    seen = {key_of(each.untyped_storage()) for each in passed_tensors((args, kwargs))}
    made: list[Layout | None] = []
    sizes: list[int] = []
    for tensor in passed_tensors(result):
        storage = tensor.untyped_storage()
        is_new = tensor.layout is torch.strided and key_of(storage) not in seen
        seen.add(key_of(storage))
        made.append(layout_of(tensor) if is_new else None)
        sizes.append(storage.nbytes() if is_new else 0)
    return KernelRun(tuple(changes.cpu), tuple(made), tuple(sizes))
