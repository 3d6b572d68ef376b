"""A record for each line that a line profiler measured, and the tables that show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tenure._errors import ProfilerUsageError
from tenure._show import Amount, Column, Paragraph, Part, Report, Table
from tenure._text import format_bytes

_COLUMNS = {
    "hits": "hits",
    "alloc": "allocated_bytes",
    "freed": "freed_bytes",
    "net": "net_bytes",
    "peak": "peak_bytes",
}
"""The field of a record that each column shows."""
# net is what they come to
_SPARE = {"freed": 2, "alloc": 1}


@dataclass(frozen=True, slots=True)
class LineRecord:
    """What one line of a profiled function did, summed over its hits.

    What a line calls counts for the lines of the called function if that is profiled too, so that
    the records of all functions add up to what the allocator did; only ``peak_bytes`` covers it.

    Attributes:
        function: the qualified name of the function.
        line: the line's number in its file.
        hits: how often the line was begun.
        allocated_bytes: bytes that were allocated, those of temporaries inside operations too.
        freed_bytes: bytes that were freed. What the variables of a function held is freed on the
            line that returned.
        peak_bytes: the most that was live at once while the line ran, above what was live when the
            profiler was enabled.
        device: the device that is meant.
        exact: False if another profiler kept the allocator's events to itself, or another thread
            was inside a profiled function when this was read: the line has allocated and freed at
            least as much as it says.
        peak_exact: False where the peak is only known to be at least as high.
        source: the line as it stands in the file; empty where there is none.
        file: the path of the file.
    """

    function: str
    line: int
    hits: int
    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    device: torch.device
    exact: bool = True
    peak_exact: bool = True
    source: str = ""
    file: str = ""

    _figures: ClassVar = ("net_bytes",)

    @property
    def net_bytes(self) -> int:
        """By how much live memory grew; negative where it shrank."""
        return self.allocated_bytes - self.freed_bytes


# --- columns


def checked_columns(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns of these names.

    Raises:
        ProfilerUsageError: there is no such column.
    """
    if names is None:
        return tuple(_COLUMNS)
    if isinstance(names, str):
        names = (names,)
    for name in names:
        if name not in _COLUMNS:
            raise ProfilerUsageError(
                f"There is no column {name!r}. There are {', '.join(_COLUMNS)}. Of the fields of "
                "memory_stats() there are none: for active_bytes.all.peak ask for peak."
            )
    return tuple(names)


def _cell(name: str, record: LineRecord | None) -> str:
    """Return the number that a record has in a column, and whether it is only a bound."""
    if record is None:
        return ""
    value: int = getattr(record, _COLUMNS[name])
    text = str(value) if name == "hits" else format_bytes(value)
    is_exact = record.peak_exact if name == "peak" else record.exact
    is_bound = name in ("alloc", "freed", "peak") and not is_exact
    return Amount(f">= {text}" if is_bound else text, value)


# --- tables


@dataclass(frozen=True, slots=True)
class Section:
    """One function on one device.

    Attributes:
        title: its name, file and line, and the device.
        rows: the number and the source of each line, and its record if it ran.
        note: why there are no rows; empty where there are.
    """

    title: str
    rows: tuple[tuple[int, str, LineRecord | None], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class RecordsDisplay(Report):
    """Records with the source around them; it shows itself wherever it is printed."""

    sections: tuple[Section, ...]
    columns: tuple[str, ...]

    _is_spaced: ClassVar = True

    @property
    def records(self) -> tuple[LineRecord, ...]:
        """The records that are shown, in the order of the lines."""
        rows = (row for section in self.sections for row in section.rows)
        return tuple(record for _, _, record in rows if record is not None)

    def __repr__(self) -> str:
        return str(self)

    def _parts(self) -> list[Part]:
        return [self._part(section) for section in self.sections]

    def _part(self, section: Section) -> Part:
        # as pytorch_memlab heads its tables
        title = f"## {section.title}" if section.title else ""
        if section.note:
            return Paragraph(title, section.note)
        columns = [
            Column(name, ">", is_fixed=True, spare=_SPARE.get(name, 0))
            for name in ("line", *self.columns)
        ]
        rows = [
            (str(line), *(_cell(name, record) for name in self.columns), source)
            for line, source, record in section.rows
        ]
        code = Column("code", is_fixed=True, is_code=True)
        return Table(title, [*columns, code], rows, rule="")
