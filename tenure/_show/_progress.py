"""How far work is that takes long, on the terminal of whoever waits, and nowhere else.

Invariant: the standard output is never touched, and of calls inside of one another the outermost
alone shows something.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from tenure._byte_sizes import format_bytes

_SWITCH = "TENURE_PROGRESS"
_PATIENCE_S = 2.0

display = threading.Lock()
"""Held by the call that may show how far it is; of others inside of it, or beside, none does."""


@contextmanager
def steps(
    label: str, *, are_counted: bool = True, patience_s: float = _PATIENCE_S
) -> Iterator[Callable[[str], None]]:
    """Return a block that says what it is at once it has taken two seconds, in lines that stay.

    Only if the standard error is a terminal, and ``TENURE_PROGRESS`` is not 0. Each line comes
    after twice the time of the one before, so that they are few, however long the work takes.

    Args:
        label: whose steps they are.
        are_counted: whether a line has the number of its step.
        patience_s: how long nothing is said; 0 where the first step may take longer.

    Yields:
        A function to call as each step begins, with the name of the step.
    """
    if not display.acquire(blocking=False):
        # the other call shows its progress
        yield lambda what: None
        return
    try:
        yield _ProgressLines(label, are_counted, patience_s).begin
    finally:
        display.release()


@contextmanager
def progress(label: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Return a block that says how much of its work is done, as `steps` says what it is at.

    Args:
        label: what is done.
        total: how much there is to do.
        in_bytes: whether that is a number of bytes.

    Yields:
        A function to call with the amount that was done since its last call.
    """
    spelled: Callable[[int], str] = format_bytes if in_bytes else str
    n_done = 0
    with steps(label, are_counted=False) as show:

        def advance(n: int) -> None:
            nonlocal n_done
            n_done += n
            show(f"{spelled(n_done)} of {spelled(total)}")

        yield advance


class _ProgressLines:
    def __init__(self, label: str, are_counted: bool, patience_s: float) -> None:
        self._label, self._are_counted = label, are_counted
        self._n_steps = 0
        self._began = monotonic()
        self._patience_s = patience_s

    def begin(self, what: str) -> None:
        self._n_steps += 1
        elapsed_s = monotonic() - self._began
        if elapsed_s < self._patience_s:
            return
        self._patience_s = max(2 * elapsed_s, _PATIENCE_S)
        # a terminal that is gone is no error of the work
        with suppress(Exception):
            if _is_wanted():
                number = f"step {self._n_steps}, " if self._are_counted else ""
                told = f"tenure: {self._label}: {what} ({number}{elapsed_s:.0f} s)"
                print(told, file=sys.stderr, flush=True)


def _is_wanted() -> bool:
    # of the ranks that torchrun starts on one terminal, the first: they do the same
    if os.environ.get(_SWITCH) == "0" or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    return sys.stderr is not None and sys.stderr.isatty() and not _another_draws()


def _another_draws() -> bool:
    """Return whether the program has a display of tqdm or rich open, which a line would break."""
    tqdm, rich = sys.modules.get("tqdm.std"), sys.modules.get("rich")
    # neither tells; with other names than these in a release to come, lines are printed
    bars = getattr(getattr(tqdm, "tqdm", None), "_instances", None)
    console = getattr(rich, "_console", None)
    return bool(bars or getattr(console, "_live_stack", None) or getattr(console, "_live", None))
