"""One table for three readers: plain text, rich, and a notebook; all text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from rich import table as rich_tables
    from rich import text as rich_texts
    from rich.console import RenderableType

_GAP = "  "
_RIGHT = "text-align:right"
_CODE = "text-align:left;white-space:pre;font-family:monospace"
_BAR = "#9cc3e6"
# a drawing, and no background: it is printed
_SQUARE = (
    '<svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" fill="{}"/></svg> '
)
Row = Sequence[str]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: what stands above it.
        side: ``"<"`` or ``">"``, the side that the cells stand on.
        is_fixed: it is shown even if it is empty in every row, and its numbers are never folded.
        is_code: its spaces count.
    """

    heading: str
    side: str = "<"
    is_fixed: bool = False
    is_code: bool = False


class Bar(str):
    """A number as text; in a notebook a bar behind it shows which part of the largest it is."""

    __slots__ = ("percent",)
    percent: int

    def __new__(cls, text: str, percent: int) -> Self:
        """Put the two together."""
        bar = super().__new__(cls, text)
        bar.percent = percent
        return bar


class Tinted(str):
    """Text that a colour belongs to; in a notebook a square of the colour stands before it."""

    __slots__ = ("colour",)
    colour: str

    def __new__(cls, text: str, colour: str) -> Self:
        """Put the two together; the colour as in ``#4c78a8``."""
        tinted = super().__new__(cls, text)
        tinted.colour = colour
        return tinted


class Part(Protocol):
    """What is a part of a report: it is shown to three readers."""

    def text(self) -> str:
        """As lines."""
        ...

    def rich(self) -> RenderableType:
        """For rich."""
        ...

    def html(self) -> str:
        """As HTML."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings.

    Attributes:
        title: what stands above the table.
        columns: the columns; one that is empty in every row is left out.
        rows: the cells of each row; a cell can have several lines where the table is ruled.
        note: what stands below the table.
        is_ruled: rich draws a line below each row.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    is_ruled: bool = False

    def text(self) -> str:
        """The title and the table as lines."""
        return f"{self.title}\n{self.body()}"

    def body(self, rule: str = "-") -> str:
        """The table as lines, the headings underlined with ``rule``."""
        shown = self._shown()
        columns = [self.columns[i] for i in shown]
        widths = [max(map(len, (self.columns[i].heading, *self._cells(i)))) for i in shown]
        lines = [[column.heading for column in columns]]
        if rule:
            lines.append([rule * width for width in widths])
        lines += ([row[i] for i in shown] for row in self.rows)
        return "\n".join(line_of(line, columns, widths) for line in lines)

    def rich(self) -> rich_tables.Table:
        """The table for rich, under its title."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(self.title),
            title_justify="left",
            caption=Text(self.note) if self.note else None,
            caption_justify="left",
            show_lines=self.is_ruled,
        )
        shown = self._shown()
        for column in (self.columns[i] for i in shown):
            is_number = column.side == ">"
            table.add_column(
                column.heading,
                justify="right" if is_number else "left",
                overflow="fold",
                # A folded number reads as two.
                no_wrap=is_number and column.is_fixed,
            )
        for row in self.rows:
            # as Text: brackets in plain strings are markup
            table.add_row(*(Text(row[i], style=getattr(row[i], "colour", "")) for i in shown))
        return table

    def html(self) -> str:
        """The table as HTML, under a caption."""
        shown = self._shown()
        head = "".join(f"<th>{html.escape(self.columns[i].heading)}</th>" for i in shown)
        body = "".join(
            f"<tr>{''.join(_html_cell(row[i], self.columns[i]) for i in shown)}</tr>"
            for row in self.rows
        )
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<tr>{head}</tr>{body}</table>{note}"

    def _shown(self) -> list[int]:
        return [
            i
            for i, column in enumerate(self.columns)
            # An empty table shows what it would have; a column that says nothing in any row takes
            # width.
            if column.is_fixed or not self.rows or any(self._cells(i))
        ]

    def _cells(self, i: int) -> Iterator[str]:
        return (row[i] for row in self.rows)


class Paragraph(NamedTuple):
    """What a report says where a table has no rows to show; the title can be empty."""

    title: str
    note: str

    def text(self) -> str:
        """Both as lines."""
        return "\n".join(filter(None, self))

    def rich(self) -> rich_texts.Text:
        """Both as lines, for rich."""
        from rich.text import Text

        return Text(self.text())

    def html(self) -> str:
        """Both as HTML."""
        title = f"<b>{html.escape(self.title)}</b><br>" if self.title else ""
        return f"<p>{title}{_html_lines(self.note)}</p>"


def line_of(
    cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], gap: str = _GAP
) -> str:
    """The cells of one row, each in the width of its column."""
    padded = (
        f"{cell:{column.side}{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=False)
    )
    return gap.join(padded).rstrip()


def _html_cell(cell: str, column: Column) -> str:
    style = _CODE if column.is_code else _RIGHT if column.side == ">" else ""
    if isinstance(cell, Bar):
        part = f"{cell.percent}%"
        style += f";background:linear-gradient(90deg,{_BAR} {part},transparent {part})"
    lines = _html_lines(cell)
    if isinstance(cell, Tinted):
        lines = f"{_SQUARE.format(cell.colour)}{lines}"
    return f'<td style="{style}">{lines}</td>' if style else f"<td>{lines}</td>"


def _html_lines(text: str) -> str:
    # Escaped before the breaks are put in: names come from the user's keys, and may be markup. See
    # test_html_is_escaped.
    return "<br>".join(map(html.escape, text.split("\n")))
