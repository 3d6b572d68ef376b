"""What the chapters print with: lines of 80 columns at most, with colours on a terminal alone.

Invariant: prose is broken at words, code and reports are printed as they stand.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from tenure._show import folded

_WIDTH = 80


class Screen:
    """Standard output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def chapter(self, title: str) -> None:
        """Begin a chapter."""
        self._console.print(Text(f"\n{title}\n", style="bold"))

    def say(self, text: str) -> None:
        """Print text; each of its lines is broken at words, and keeps its indentation."""
        for line in text.splitlines():
            words = line.lstrip()
            indent = line[: len(line) - len(words)]
            for part in folded(words, _WIDTH - len(indent)):
                self.show(indent + part)

    def show(self, text: str) -> None:
        """Print text as it stands: a report, a row of a table."""
        self._console.print(Text(text))

    def code(self, source: str) -> None:
        """Print code, with a blank line behind it."""
        text = textwrap.indent(source.strip("\n"), "    ")
        if self._console.is_terminal:
            self._console.print(Syntax(text, "python", background_color="default"))
        else:
            self.show(text)
        self.show("")

    def row(self, cells: Sequence[str]) -> None:
        """Print one line of a table: a narrow column and wide ones, aligned to the right."""
        first, *others = cells
        self.show(f"{first:>6}" + "".join(f"{cell:>18}" for cell in others))

    def heading(self, cells: Sequence[str]) -> None:
        """Print the headings of a table."""
        self.row(cells)
        self.row(["-" * len(cell) for cell in cells])


def body_of(function: Callable[..., object]) -> str:
    """What a function does, as its source has it: without its head and its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    first = definition.body[0 if ast.get_docstring(definition) is None else 1]
    return textwrap.dedent("\n".join(source.splitlines()[first.lineno - 1 :]))


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
