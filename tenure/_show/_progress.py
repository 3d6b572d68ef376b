"""How far work is that takes long, on the terminal of whoever waits, and nowhere else.

Invariant: the standard output is never touched, nothing is drawn or imported before it is due, and
of calls inside of one another the outermost alone shows something.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SWITCH = "TENURE_PROGRESS"
_PATIENCE_S = 2.0
# each drawing is a write to a terminal, which may be far away
_BETWEEN_S = 0.1

display = threading.Lock()
"""Held by the call that may show how far it is; of others inside of it, or beside, none does."""


@contextmanager
def progress(label: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A block that shows how far it is once it has taken two seconds; the bar goes with it.

    Only where the standard error is a terminal, and ``TENURE_PROGRESS`` is not 0. Not for work that
    runs functions of the user: what these print would go through the bar. See `steps`.

    Args:
        label: what is done.
        total: how much there is to do.
        in_bytes: whether that is a number of bytes.

    Yields:
        What is to be called with how much more is done.
    """
    if not display.acquire(blocking=False):
        yield _nothing
        return
    bar = _Bar(label, total, in_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()
        display.release()


@contextmanager
def steps(label: str) -> Iterator[Callable[[str], None]]:
    """A block that says what it is at once it has taken two seconds, in lines that stay.

    For work that runs functions of the user, among whose lines it has its own. Each comes after
    twice the time of the one before, so that they are few, however long it takes. Where `progress`
    shows no bar, there are none.

    Args:
        label: whose steps they are.

    Yields:
        What is to be called as each step begins, with what it is.
    """
    if not display.acquire(blocking=False):
        yield _nothing
        return
    try:
        yield _Lines(label).begin
    finally:
        display.release()


def _nothing(_: object) -> None:
    """Another call shows how far it is."""


class _Bar:
    def __init__(self, label: str, total: int, in_bytes: bool) -> None:
        self._label, self._total, self._in_bytes = label, total, in_bytes
        self._done = 0
        self._due = monotonic() + _PATIENCE_S
        self._shown: tuple[Progress, TaskID] | None = None

    def advance(self, n: int) -> None:
        self._done += n
        now = monotonic()
        if now < self._due:
            return
        self._due = now + _BETWEEN_S
        # a terminal that is gone is no error of the work
        with suppress(Exception):
            if self._shown is None and _is_wanted():
                self._open()
            if self._shown is not None:
                bar, task = self._shown
                bar.update(task, completed=self._done, refresh=True)

    def close(self) -> None:
        if self._shown is not None:
            with suppress(Exception):
                self._shown[0].stop()

    def _open(self) -> None:
        from rich import progress as bars
        from rich.console import Console

        figures = bars.DownloadColumn(True) if self._in_bytes else bars.MofNCompleteColumn()
        bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            figures,
            bars.TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            # no thread, and the program prints where it did
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.start()
        self._shown = bar, bar.add_task(self._label, total=self._total)


class _Lines:
    def __init__(self, label: str) -> None:
        self._label = label
        self._n_steps = 0
        self._began = monotonic()
        self._patience_s = _PATIENCE_S

    def begin(self, what: str) -> None:
        self._n_steps += 1
        elapsed_s = monotonic() - self._began
        if elapsed_s < self._patience_s:
            return
        self._patience_s = 2 * elapsed_s
        # a terminal that is gone is no error of the work
        with suppress(Exception):
            if _is_wanted():
                told = f"tenure: {self._label}: {what} (step {self._n_steps}, {elapsed_s:.0f} s)"
                print(told, file=sys.stderr, flush=True)


def _is_wanted() -> bool:
    # of the ranks that torchrun starts on one terminal, the first: they do the same
    if os.environ.get(_SWITCH) == "0" or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    return sys.stderr is not None and sys.stderr.isatty() and not _another_draws()


def _another_draws() -> bool:
    """Whether the program has a display of tqdm or rich open, which a second one would break."""
    tqdm, rich = sys.modules.get("tqdm.std"), sys.modules.get("rich")
    # neither tells; with other names than these in a release to come, both are drawn
    bars = getattr(getattr(tqdm, "tqdm", None), "_instances", None)
    console = getattr(rich, "_console", None)
    return bool(bars or getattr(console, "_live_stack", None) or getattr(console, "_live", None))
