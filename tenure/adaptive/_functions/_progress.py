"""A progress bar for loops over a range or a tensor, shown only where it was asked for."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import Progress


class Bar:
    """How much of a loop is done."""

    def __init__(self, name: str, total: int) -> None:
        self._progress = Progress(transient=False)
        self._task = self._progress.add_task(name, total=total)

    def advance(self, n_done: int) -> None:
        """So much more is done."""
        self._progress.advance(self._task, n_done)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
