"""Tables, whose rows are ranked, cut and summed up in one way.

Invariant: each row that is left out is counted, with its bytes, in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tenure._text import format_bytes
from tenure._visible import visible

from ._part import Paragraph, Part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

MOST_ROWS = 20
"""The rows that a table shows if nobody asks for more; `to_dict` of its report has all."""
_GAP = 2
# what a name gets before another column is left out for it
_COMFORT = 30
_SHARED = "In brackets: in the storage of another row, which counts it."
Row = Sequence[Any]
"""The cells of a row: text, or what else rich can print."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: its name, which the rows can be sorted by.
        side: ``"<"`` or ``">"``, to align the cells; those on the right are figures, which are
            never broken.
        is_fixed: it is shown even if it is empty in every row.
        is_code: a line that is too long ends in an ellipsis.
        spare: of the columns that have one, the one with the highest is the first to be left out
            if lines are too narrow for all; without one it stays.
        spelled: spells the sum of the rows left out; None if the column has no sum.
    """

    heading: str
    side: str = "<"
    is_fixed: bool = False
    is_code: bool = False
    spare: int = 0
    spelled: Callable[[int], str] | None = None


class Amount(str):
    """A number as text.

    Attributes:
        value: the number.
        is_counted: False if another row counts it, and no sum may count it again.
    """

    __slots__ = ("is_counted", "value")
    value: int
    is_counted: bool

    def __new__(cls, text: str, value: int, is_counted: bool = True) -> Self:
        """Put them together."""
        amount = super().__new__(cls, text)
        amount.value = value
        amount.is_counted = is_counted
        return amount


def in_bytes(n_bytes: int) -> Amount:
    """Return a number of bytes for a cell."""
    return Amount(format_bytes(n_bytes), n_bytes)


def signed(n_bytes: int) -> str:
    """Return a difference of bytes in words, with its sign."""
    return f"{'+' if n_bytes > 0 else ''}{format_bytes(n_bytes)}"


def storage_bytes(n_bytes: int, *, is_shared: bool) -> Amount:
    """Return the bytes of a tensor's storage for a cell.

    A storage counts once: if another row has it, the number is in brackets, and no sum has it
    again.
    """
    text = format_bytes(n_bytes)
    return Amount(f"({text})" if is_shared else text, n_bytes, is_counted=not is_shared)


def note_on_shared(are_shared: Iterable[bool]) -> str:
    """Return the meaning of the brackets of `storage_bytes`, if there are any."""
    return _SHARED if any(are_shared) else ""


def by_bytes(n_bytes: int) -> Amount:
    """Return a difference of bytes for a cell."""
    return Amount(signed(n_bytes), n_bytes)


def bytes_column(heading: str = "bytes", spelled: Callable[[int], str] = format_bytes) -> Column:
    """Return a column of bytes that add up."""
    return Column(heading, ">", spelled=spelled)


@dataclass(frozen=True, slots=True)
class Table(Part):
    """Rows under headings.

    Attributes:
        title: the lines above the table; can be empty.
        columns: the columns; one that is empty in every row is left out.
        rows: the cells of each row; a cell can have several lines.
        note: the lines below the table.
        by: the heading that the rows are sorted by: figures the largest first, whatever their sign,
            names by the alphabet. Empty if the order of the rows says something: then all are
            shown.
        most: the rows that are shown.
        rule: the character that underlines the headings; empty for no line.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    by: str = ""
    most: int = MOST_ROWS
    rule: str = "-"

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the title, the headings, the rows and the note."""
        from rich.measure import measure_renderables
        from rich.rule import Rule
        from rich.table import Table as Grid
        from rich.text import Text

        # An empty table shows the columns that it would have.
        shown = {
            i: [
                Text(visible(column.heading), "bold"),
                *(_printable(row[i], column) for row in self.rows),
            ]
            for i, column in enumerate(self.columns)
            if column.is_fixed or not self.rows or any(row[i] for row in self.rows)
        }
        widths = {i: measure_renderables(console, options, shown[i]).maximum for i in shown}
        room = options.max_width + _GAP
        for i in sorted(widths, key=lambda i: -self.columns[i].spare):
            needed = sum(min(width, _COMFORT) + _GAP for width in widths.values())
            if needed > room and self.columns[i].spare:
                del widths[i], shown[i]
        grid = Grid.grid(padding=(0, _GAP, 0, 0))
        for i in shown:
            if self.columns[i].side == ">":
                grid.add_column(justify="right", no_wrap=True)
            else:
                grid.add_column(overflow="fold")
        headings, *rows = zip(*shown.values(), strict=True)
        grid.add_row(*headings)
        if self.rule:
            grid.add_row(*[Rule(characters=self.rule, style="dim")] * len(shown))
        for row in rows:
            grid.add_row(*row)
        yield Paragraph(self.title)
        yield grid
        yield Paragraph("", self.note)

    def sorts(self) -> Collection[str]:
        """Return the headings of the columns."""
        return [column.heading for column in self.columns if column.heading]

    def arranged(self, top: int | None, sort: str | None) -> Self:
        """Return the table with the rows that are shown, in their order, and one for the others."""
        by = sort if sort in self.sorts() else self.by
        # The order says something, and nobody asked for another.
        if not by and top is None:
            return self
        rows = list(self.rows)
        if by:
            at = next(i for i, column in enumerate(self.columns) if column.heading == by)
            rows.sort(key=lambda row: _rank(row[at]))
        most = self.most if top is None else top
        if rest := rows[most:]:
            name = next(i for i, column in enumerate(self.columns) if column.side == "<")
            last = [_sum(column, [row[i] for row in rest]) for i, column in enumerate(self.columns)]
            last[name] = f"and {len(rest)} more"
            rows[most:] = [last]
        return replace(self, rows=rows)


def _printable(cell: Any, column: Column) -> Any:
    from rich.text import Text

    if not isinstance(cell, str):
        return cell
    if column.is_code:
        return Text(visible(cell.expandtabs()), no_wrap=True, overflow="ellipsis")
    return Text(visible(cell))


def _rank(cell: str) -> tuple[bool, int, str]:
    """Return the key that a cell is sorted by: figures before names, and before nothing."""
    if isinstance(cell, Amount):
        # of equal ones in their order, what counts the storage before what shares it
        return (False, -abs(cell.value), "" if cell.is_counted else _SHARED)
    return (True, 0, cell)


def _sum(column: Column, cells: Sequence[str]) -> str:
    if column.spelled is None:
        return ""
    amounts = [cell for cell in cells if isinstance(cell, Amount)]
    return column.spelled(sum(amount.value for amount in amounts if amount.is_counted))
