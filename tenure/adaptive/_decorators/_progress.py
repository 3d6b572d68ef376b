"""A progress bar for loops over a range or a tensor, shown only where it was asked for.

Invariant: a process shows one at a time, the outermost: rich before 14.1 refuses a second display.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.errors import LiveError
from rich.progress import Progress

_is_shown = threading.Lock()


class Bar:
    """How much of a loop is done; not shown where another bar or display is."""

    def __init__(self, name: str, total: int) -> None:
        self._progress = Progress(transient=False)
        self._task = self._progress.add_task(name, total=total)
        self._shows = False

    def advance(self, n_done: int) -> None:
        """So much more is done."""
        self._progress.advance(self._task, n_done)

    def __enter__(self) -> Self:
        self._shows = _is_shown.acquire(blocking=False)
        if self._shows:
            try:
                self._progress.start()
            except BaseException as error:
                self._shows = False
                _is_shown.release()
                if not isinstance(error, LiveError):  # that is a display of the program's own
                    raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._shows:
            return
        try:
            self._progress.stop()
        finally:
            self._shows = False
            _is_shown.release()
