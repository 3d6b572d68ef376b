"""A bar for work that takes long, on the terminal of whoever waits, and nowhere else.

Invariant: the standard output is never touched, and nothing is drawn or imported before it is due.
"""

from __future__ import annotations

import os
import sys
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


@contextmanager
def progress(label: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A block that shows how far it is once it has taken two seconds; the bar goes with it.

    Only where the standard error is a terminal, and ``TENURE_PROGRESS`` is not 0.

    Args:
        label: what is done.
        total: how much there is to do.
        in_bytes: whether that is a number of bytes.

    Yields:
        What is to be called with how much more is done.
    """
    bar = _Bar(label, total, in_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()


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


def _is_wanted() -> bool:
    return os.environ.get(_SWITCH) != "0" and sys.stderr is not None and sys.stderr.isatty()
