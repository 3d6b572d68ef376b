"""A table that is sorted by any column, and searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Cell = str | int | Sequence[str] | tuple[int, str] | None
"""Text, a number, lines one below the other, or a number with how it is spelled."""


class GridColumn(NamedTuple):
    """A column.

    Attributes:
        heading: what stands above it.
        kind: ``"text"``; ``"name"`` for text with a colour; ``"code"`` for source, whose
            spaces count; ``"place"`` for a line of it; ``"count"`` and ``"bytes"`` for numbers;
            ``"lines"`` for a list.
        has_bar: behind each number stands which part of the largest it is.
    """

    heading: str
    kind: Literal["text", "name", "code", "place", "count", "bytes", "lines"] = "text"
    has_bar: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    Attributes:
        title: what it shows, as plain text.
        columns: its columns.
        rows: the cells of each row; they stand in this order until the reader sorts them.
        colour: the way, as of a chart, whose colours the names have.
        note: what stands below it.
        n_first: so many rows are shown until the reader asks for all.
    """

    title: str
    columns: Sequence[GridColumn]
    rows: Sequence[Sequence[Cell]]
    colour: str = ""
    note: str = ""
    n_first: int = 20

    kind = "grid"

    def names(self) -> Iterator[tuple[str, str]]:
        """Each name that needs a colour."""
        for i, column in enumerate(self.columns):
            if column.kind == "name":
                yield from ((self.colour, str(row[i])) for row in self.rows)

    def facts(self) -> dict[str, object]:
        """What the table is made of."""
        return {
            "title": self.title,
            "columns": [column._asdict() for column in self.columns],
            "rows": [list(row) for row in self.rows],
            "colour": self.colour,
            "note": self.note,
            "first": self.n_first,
        }
