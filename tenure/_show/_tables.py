"""One table for three readers: plain text, rich, and a notebook; all text is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

_GAP = "  "
Row = Sequence[str]


class Column(NamedTuple):
    """A heading, and ``"<"`` or ``">"`` for the side that the cells stand on."""

    heading: str
    side: str = "<"


def text_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table as lines; a column that is empty in every row is left out."""
    shown = _shown(columns, rows)
    widths = {i: max(len(cell) for cell in (columns[i].heading, *_cells(rows, i))) for i in shown}
    lines = [[f"{columns[i].heading:{columns[i].side}{widths[i]}}" for i in shown]]
    lines.append(["-" * widths[i] for i in shown])
    lines += ([f"{row[i]:{columns[i].side}{widths[i]}}" for i in shown] for row in rows)
    return "\n".join(_GAP.join(line).rstrip() for line in lines)


def rich_table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """The table for rich, under a title."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    shown = _shown(columns, rows)
    for i in shown:
        justify = "right" if columns[i].side == ">" else "left"
        table.add_column(columns[i].heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        # as Text: brackets in plain strings are markup
        table.add_row(*(Text(row[i]) for i in shown))
    return table


def html_table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table as HTML, under a caption."""
    shown = _shown(columns, rows)
    head = "".join(f"<th>{html.escape(columns[i].heading)}</th>" for i in shown)
    body = "".join(
        f"<tr>{''.join(_html_cell(row[i], columns[i]) for i in shown)}</tr>" for row in rows
    )
    return f"<table><caption>{html.escape(title)}</caption><tr>{head}</tr>{body}</table>"


def _html_cell(cell: str, column: Column) -> str:
    side = ' style="text-align: right"' if column.side == ">" else ""
    return f"<td{side}>{html.escape(cell)}</td>"


def _shown(columns: Sequence[Column], rows: Sequence[Row]) -> list[int]:
    return [i for i in range(len(columns)) if not rows or any(_cells(rows, i))]


def _cells(rows: Sequence[Row], i: int) -> list[str]:
    return [row[i] for row in rows]
