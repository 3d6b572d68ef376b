"""One table for three readers, whose rows are ranked, cut and summed up in one way.

Invariant: each row that is left out is counted, with its bytes, in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from tenure._text import format_bytes

from ._part import FAINT, PLAIN, STRONG, Line, Paragraph, Part
from ._width import cell_len, cut, folded, least_width, padded

MOST_ROWS = 20
"""The rows that a table shows where nobody asks for more; `to_dict` of its report has all."""
_GAP = "  "
# what a name gets before another column is left out for it
_COMFORT = 30
_CODE_COMFORT = 40
_LEAST = 8
_SHARED = "In brackets: in the storage of another row, which counts it."
Row = Sequence[str]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: what stands above it, and what the rows are sorted by.
        side: ``"<"`` or ``">"``, the side that the cells stand on; those on the right are figures,
            which are never broken.
        is_fixed: it is shown even if it is empty in every row.
        is_code: its spaces count; a line that is too long ends in an ellipsis.
        spare: of the columns that have one, that with the highest is the first to be left out where
            lines are too narrow for all; without one it stays.
        spelled: how the sum of what the rows left out have in it reads; None where it has no sum.
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
        is_counted: False where another row counts it, and no sum may count it again.
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


class Tinted(str):
    """Text that a colour belongs to."""

    __slots__ = ("colour",)
    colour: str

    def __new__(cls, text: str, colour: str) -> Self:
        """Put the two together; the colour as in ``#4c78a8``."""
        tinted = super().__new__(cls, text)
        tinted.colour = colour
        return tinted


def in_bytes(n_bytes: int) -> Amount:
    """A number of bytes, in a cell."""
    return Amount(format_bytes(n_bytes), n_bytes)


def signed(n_bytes: int) -> str:
    """A difference of bytes in words, the sign before it."""
    return f"{'+' if n_bytes > 0 else ''}{format_bytes(n_bytes)}"


def storage_bytes(n_bytes: int, *, is_shared: bool) -> Amount:
    """The bytes of a tensor, in a cell: those of its storage, whatever part of it the tensor shows.

    It is what the tensor keeps alive, and the same number in every report. A storage counts once:
    where another row has it, the number stands in brackets, and no sum has it again.
    """
    text = format_bytes(n_bytes)
    return Amount(f"({text})" if is_shared else text, n_bytes, is_counted=not is_shared)


def note_on_shared(are_shared: Iterable[bool]) -> str:
    """What the brackets of `storage_bytes` mean, where there are any."""
    return _SHARED if any(are_shared) else ""


def by_bytes(n_bytes: int) -> Amount:
    """A difference of bytes, in a cell."""
    return Amount(signed(n_bytes), n_bytes)


def bytes_column(heading: str = "bytes", spelled: Callable[[int], str] = format_bytes) -> Column:
    """A column of bytes that add up."""
    return Column(heading, ">", spelled=spelled)


@dataclass(frozen=True, slots=True)
class Table(Part):
    """Rows under headings.

    Attributes:
        title: what stands above the table; can be empty.
        columns: the columns; one that is empty in every row is left out.
        rows: the cells of each row; a cell can have several lines.
        note: what stands below the table.
        by: the heading that the rows are sorted by: figures the largest first, whatever their sign,
            names by the alphabet. Empty where the order of the rows says something: then all are
            shown.
        most: the rows that are shown.
        total: a row below all others; None for none.
        rule: what the headings are underlined with; empty for no line.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    by: str = ""
    most: int = MOST_ROWS
    total: Row | None = None
    rule: str = "-"

    def lines(self, width: int) -> Iterator[Line]:
        """The title, the headings, the rows and the note."""
        yield from Paragraph(self.title).lines(width)
        shown, widths = self._layout(width)
        columns = [self.columns[i] for i in shown]
        yield from _row_lines([column.heading for column in columns], columns, widths, STRONG)
        if self.rule:
            yield [(_GAP.join(self.rule * width for width in widths), FAINT)]
        for row in self._all_rows():
            yield from _row_lines([row[i] for i in shown], columns, widths)
        yield from Paragraph("", self.note).lines(width)

    def sorts(self) -> Collection[str]:
        """The headings of the columns."""
        return [column.heading for column in self.columns if column.heading]

    def arranged(self, top: int | None, sort: str | None) -> Self:
        """The rows that are shown, in their order, and one for the others."""
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
            rows[most:] = [self._rest(rest)]
        return replace(self, rows=rows)

    def _rest(self, rows: Sequence[Row]) -> Row:
        name = next(i for i, column in enumerate(self.columns) if column.side == "<")
        cells = [_sum(column, [row[i] for row in rows]) for i, column in enumerate(self.columns)]
        cells[name] = f"and {len(rows)} more"
        return cells

    def _all_rows(self) -> Iterator[Row]:
        yield from self.rows
        if self.total is not None:
            yield self.total

    def _shown(self) -> list[int]:
        return [
            i
            for i, column in enumerate(self.columns)
            # An empty table shows what it would have; a column that says nothing in any row takes
            # width.
            if column.is_fixed or not self.rows or any(self._cells(i))
        ]

    def _cells(self, i: int) -> Iterator[str]:
        return (row[i] for row in self._all_rows())

    def _layout(self, width: int) -> tuple[list[int], list[int]]:
        """The columns that there is room for, and how wide each of them is."""
        shown = self._shown()
        sizes = {i: self._sizes(i) for i in shown}
        room = width - len(_GAP) * (len(shown) - 1)
        spare = sorted((i for i in shown if self.columns[i].spare), key=self._spare_of)
        while (
            spare and sum(min(most, max(least, _COMFORT)) for least, most in sizes.values()) > room
        ):
            del sizes[spare.pop()]
            room = width - len(_GAP) * (len(sizes) - 1)
        return list(sizes), _shared(list(sizes.values()), room)

    def _spare_of(self, i: int) -> int:
        return self.columns[i].spare

    def _sizes(self, i: int) -> tuple[int, int]:
        """How narrow a column can be, and how wide it would be."""
        column = self.columns[i]
        heading, cells = column.heading, list(self._cells(i))
        widest = max(cell_len(line) for cell in (heading, *cells) for line in cell.split("\n"))
        if column.side == ">":
            return max(least_width(heading), *map(cell_len, cells), 0), widest
        if column.is_code:
            return max(cell_len(heading), min(widest, _CODE_COMFORT)), widest
        return max(map(least_width, (heading, *cells))), widest


def _shared(sizes: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Widths that fill the room: narrow columns have what they want, the others as much each."""
    if sum(least for least, _ in sizes) > room:
        # Only a name that is wider than a terminal gets here, and is cut.
        sizes = [(min(least, max(_LEAST, room // len(sizes))), most) for least, most in sizes]
    cap = max((most for _, most in sizes), default=0)
    while cap and sum(max(least, min(most, cap)) for least, most in sizes) > room:
        cap -= 1
    return [max(least, min(most, cap)) for least, most in sizes]


def _row_lines(
    cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], style: str = PLAIN
) -> Iterator[Line]:
    """The lines of one row: each cell in the width of its column, broken where it is wider."""
    broken = [
        [cut(cell, width)]
        if column.is_code
        else [line for text in cell.split("\n") for line in folded(text, width)]
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    styles = [getattr(cell, "colour", style) for cell in cells]
    for i in range(max(map(len, broken), default=0)):
        line: list[tuple[str, str]] = []
        for texts, column, width, tint in zip(broken, columns, widths, styles, strict=True):
            text = texts[i] if i < len(texts) else ""
            line += [(_GAP, PLAIN)] * bool(line) + [(padded(text, column.side, width), tint)]
        yield line


def _rank(cell: str) -> tuple[bool, int, str]:
    """What a cell is sorted by: figures before names, and before nothing."""
    if isinstance(cell, Amount):
        # of equal ones in their order, what counts the storage before what shares it
        return (False, -abs(cell.value), "" if cell.is_counted else _SHARED)
    return (True, 0, cell)


def _sum(column: Column, cells: Sequence[str]) -> str:
    if column.spelled is None:
        return ""
    amounts = [cell for cell in cells if isinstance(cell, Amount)]
    return column.spelled(sum(amount.value for amount in amounts if amount.is_counted))
