"""The parts of a total: a row for each part, with its bytes, its share and its bar.

Each bar begins where the one above it ends, so that no colour is needed to tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenure._text import format_bytes
from tenure._visible import visible

from ._colours import colours_of
from ._part import Part
from ._table import Column, Row, Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

_WIDTH = 32
_MOST_TIMES = 1000
_COLUMNS = (
    Column("category"),
    Column("bytes", ">", is_fixed=True),
    Column("share", ">", is_fixed=True),
    Column("", spare=1),
)


def ranked(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return parts with the largest first."""
    return sorted(parts, key=lambda part: -part[1])


@dataclass(frozen=True, slots=True)
class Amounts(Part):
    """Parts of a total.

    Attributes:
        title: the line above; can be empty.
        parts: the name and the bytes of each, in their order. One without bytes is left out, and a
            negative one has no bar.
        limit_bytes: the bytes that there are, in the last row; None if nothing is known of that.
    """

    title: str
    parts: Sequence[tuple[str, int]]
    limit_bytes: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield a row for each part, for the total and for the limit."""
        from rich.bar import Bar
        from rich.text import Text

        total_bytes = sum(n_bytes for _, n_bytes in self.parts)
        scale_bytes = max(sum(max(n, 0) for _, n in self.parts), self.limit_bytes or 0)

        def row(name: str, n_bytes: int, begin_bytes: int = 0, colour: str = "default") -> Row:
            end_bytes = begin_bytes + max(n_bytes, 0)
            bar = Bar(scale_bytes, begin_bytes, end_bytes, width=_WIDTH, color=colour)
            # a budget a thousand times the total says nothing in percent, and its digits widen the
            # line
            is_told = total_bytes > 0 and n_bytes <= _MOST_TIMES * total_bytes
            share = f"{n_bytes / total_bytes:.1%}" if is_told else ""
            shown = Text(visible(name), colour)
            return shown, format_bytes(n_bytes), share, bar if scale_bytes else ""

        colours = colours_of(name for name, _ in self.parts)
        rows, begin_bytes = [], 0
        for name, n_bytes in self.parts:
            if n_bytes:
                rows.append(row(name, n_bytes, begin_bytes, colours[name]))
            begin_bytes += max(n_bytes, 0)
        rows.append(row("total", total_bytes))
        if self.limit_bytes is not None:
            rows.append(row("budget", self.limit_bytes))
        yield Table(self.title, _COLUMNS, rows)
