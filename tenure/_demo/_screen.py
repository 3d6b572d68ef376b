"""What the chapters print with: plain text in a pipe, colours and a progress bar on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

Row = Sequence[str]


class Screen:
    """Standard output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def chapter(self, title: str) -> None:
        """Begin a chapter."""
        self._console.print(Text(f"\n{title}", style="bold"))

    def say(self, text: str) -> None:
        """Print a line of text as it stands."""
        self._console.print(Text(text))

    def row(self, cells: Row) -> None:
        """Print one line of a table: a narrow column and wide ones, aligned to the right."""
        first, *others = cells
        self.say(f"{first:>6}" + "".join(f"{cell:>18}" for cell in others))

    def heading(self, cells: Row) -> None:
        """Print the headings of a table."""
        self.row(cells)
        self.row(["-" * len(cell) for cell in cells])

    @contextmanager
    def progress(self, label: str, n_steps: int) -> Iterator[Callable[[], None]]:
        """A bar on a terminal, nothing elsewhere; call what it yields after each step."""
        columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as bar:
            task = bar.add_task(label, total=n_steps)
            yield lambda: bar.advance(task)


@contextmanager
def silent(name: str) -> Iterator[None]:
    """A block in which a logger, and those above it, print nothing: the demo prints it itself."""
    logger = logging.getLogger(name)
    nowhere = logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(nowhere)
    try:
        yield
    finally:
        logger.removeHandler(nowhere)
        logger.propagate = propagate
