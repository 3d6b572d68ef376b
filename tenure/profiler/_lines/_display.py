"""What a line profiler found, and how it looks: a record for each line, its columns, its tables."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch

from tenure._callers import line_in
from tenure._errors import ProfilerUsageError, ReportFormatError
from tenure._show import Amount, Column, Paragraph, Report, Table, plain, restored
from tenure._text import format_bytes

DEFAULT_COLUMNS = ("hits", "alloc", "freed", "net", "peak")
# Every field of memory_stats() that is measured by pool, as torch names them:
# https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
_MEASURED = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
    "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_POOLS = ("all", "large_pool", "small_pool")
_FIGURES = ("current", "peak", "allocated", "freed")
_FIELDS = {f"{what}.{pool}.{f}" for what in _MEASURED for pool in _POOLS for f in _FIGURES}

_FIELDS_IN_WORDS = (
    f"as the fields of a device's memory_stats(), one of {', '.join(_MEASURED)}, with "
    f".{' or .'.join(_POOLS)} and .{' or .'.join(_FIGURES)} behind it, as in active_bytes.all.peak"
)

_CODE = Column("code", is_fixed=True, is_code=True)
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
        exact: False where another profiler kept the allocator's events to itself: the line has
            allocated and freed at least as much as it says; or where it is ``shared``.
        shared: True where other threads used the device while the line ran, and its counters don't
            tell whose is what: some of the line's bytes may stand on their lines, or theirs here.
            Together the lines of all threads add up. Never ``exact``.
        peak_exact: False where the peak is only known to be at least as high.
        source: the line as it stands in the file; empty where there is none.
        file: the path of the file.
        statistics: the largest value of each field of the device's ``memory_stats()``; empty for
            the CPU, which has none.
    """

    function: str
    line: int
    hits: int
    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    device: torch.device
    exact: bool = True
    shared: bool = False
    peak_exact: bool = True
    source: str = ""
    file: str = ""
    statistics: Mapping[str, int] = field(default_factory=dict, repr=False)

    _figures: ClassVar = ("net_bytes",)

    @property
    def net_bytes(self) -> int:
        """By how much live memory grew; negative where it shrank."""
        return self.allocated_bytes - self.freed_bytes

    def to_dict(self) -> dict[str, Any]:
        """The record as values that JSON has."""
        facts: dict[str, Any] = plain(self)
        return facts

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Read a record that ``to_dict`` gave, in this process or in another one.

        Raises:
            ReportFormatError: something is missing, or is no such value.
        """
        record: Self = restored(cls, data, cls.__name__)
        return record


# --- columns


@dataclass(frozen=True, slots=True)
class LineColumn:
    """One column.

    Attributes:
        name: its heading.
        value: the number that a record has in it, or None.
        is_exact: whether that number is not just a lower bound.
        in_bytes: whether it is a number of bytes.
        of_bytes_moved: whether it says what was allocated or freed: that may be another thread's.
    """

    name: str
    value: Callable[[LineRecord], int | None]
    is_exact: Callable[[LineRecord], bool]
    in_bytes: bool = True
    of_bytes_moved: bool = False

    def cell(self, record: LineRecord) -> str:
        """The number as people read it."""
        value = self.value(record)
        if value is None:
            return ""
        text = format_bytes(value) if self.in_bytes else str(value)
        if self.is_exact(record):
            return text
        # Of a shared device, some of it may be another thread's: neither more nor less is certain.
        return f"~ {text}" if record.shared and self.of_bytes_moved else f">= {text}"


_COLUMNS = {
    column.name: column
    for column in (
        LineColumn("hits", lambda r: r.hits, lambda _: True, in_bytes=False),
        LineColumn("alloc", lambda r: r.allocated_bytes, lambda r: r.exact, of_bytes_moved=True),
        LineColumn("freed", lambda r: r.freed_bytes, lambda r: r.exact, of_bytes_moved=True),
        LineColumn("net", lambda r: r.net_bytes, lambda r: not r.shared, of_bytes_moved=True),
        LineColumn("peak", lambda r: r.peak_bytes, lambda r: r.peak_exact),
    )
}


def columns_named(names: Sequence[str] | None, records: Iterable[LineRecord]) -> list[LineColumn]:
    """The columns of these names, of which fields of ``memory_stats()`` are some.

    Raises:
        ProfilerUsageError: there is no such column, for the devices that were measured.
    """
    if names is None:
        names = DEFAULT_COLUMNS
    if isinstance(names, str):
        names = (names,)
    # Those that were measured; before anything has run, those that torch documents.
    fields: set[str] = set().union(*(record.statistics for record in records))
    return [_COLUMNS.get(name) or _statistic(name, fields) for name in names]


def _statistic(name: str, fields: set[str]) -> LineColumn:
    if name not in (fields or _FIELDS):
        theirs = ", ".join(sorted(fields)) if fields else _FIELDS_IN_WORDS
        raise ProfilerUsageError(
            f"There is no column {name!r}. There are {', '.join(_COLUMNS)}, and {theirs}."
        )
    is_peak = name.endswith(".peak")
    return LineColumn(
        name,
        lambda record: record.statistics.get(name),
        lambda record: record.peak_exact or not is_peak,
        "bytes" in name.partition(".")[0],
    )


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

    @property
    def footnote(self) -> str:
        """What ``~`` means, where it stands before a number; else empty."""
        shared = next((r for _, _, r in self.rows if r is not None and r.shared), None)
        if shared is None:
            return ""
        return (
            f"~ other threads used {shared.device} while the line ran. Its counters are the "
            "process's: some of their bytes may stand here, or some of these on their lines."
        )


class RecordsDisplay(Report):
    """Records with the source around them; it shows itself wherever it is printed."""

    def __init__(self, sections: Sequence[Section], columns: Sequence[LineColumn]) -> None:
        self.sections = tuple(sections)
        self.columns = tuple(columns)

    @property
    def records(self) -> tuple[LineRecord, ...]:
        """The records that are shown, in the order of the lines."""
        rows = (row for section in self.sections for row in section.rows)
        return tuple(record for _, _, record in rows if record is not None)

    _is_spaced = True

    def __repr__(self) -> str:
        return str(self)

    def _parts(self) -> list[Table | Paragraph]:
        columns = self._columns()
        return [
            Paragraph(_heading(section.title), section.note)
            if section.note
            else _Lines(
                _heading(section.title), columns, self._rows(section), section.footnote, rule=""
            )
            for section in self.sections
        ]

    def _columns(self) -> list[Column]:
        names = ("line", *(column.name for column in self.columns))
        figures = (Column(name, ">", is_fixed=True, spare=_SPARE.get(name, 0)) for name in names)
        return [*figures, _CODE]

    def _rows(self, section: Section) -> list[list[str]]:
        return [
            [
                str(line),
                *(_cell(column, record) for column in self.columns),
                source,
            ]
            for line, source, record in section.rows
        ]

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = plain(_Facts(tuple(c.name for c in self.columns), self.sections))
        return facts

    @classmethod
    def _of_facts(cls, facts: Mapping[str, object]) -> Self:
        found: _Facts = restored(_Facts, facts, cls.__name__)
        # A column is a function; which one a name means depends on the statistics in the records.
        display = cls(found.sections, ())
        try:
            display.columns = tuple(columns_named(found.columns, display.records))
        except ProfilerUsageError as error:
            raise ReportFormatError(f"{cls.__name__}.columns: {error}") from None
        return display


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is written of a display: the columns by their names, as they are functions."""

    columns: tuple[str, ...]
    sections: tuple[Section, ...]


def section_of(
    name: str, file: str, first_line: int, source: Sequence[str], records: Sequence[LineRecord]
) -> Section:
    """The section of a function's records, all of one device; lines without source stand alone."""
    by_line = {record.line: record for record in records}
    # A method is indented twice, which costs width and tells nothing.
    code = textwrap.dedent("\n".join(source)).split("\n") if source else []
    texts = dict(enumerate(code, first_line))
    # Lines that ran without a source: code that was made at run time, or a file that changed.
    lines = sorted(texts | by_line)
    rows = tuple((line, texts.get(line, ""), by_line.get(line)) for line in lines)
    return Section(title_of(name, file, first_line, records[0].device), rows)


def title_of(name: str, file: str, first_line: int, device: torch.device | None = None) -> str:
    """What a function is called above its table."""
    place = f"{name}, {line_in(file, first_line)}"
    return f"{place}, {device}" if device is not None else place


def _cell(column: LineColumn, record: LineRecord | None) -> str:
    if record is None:
        return ""
    text, value = column.cell(record), column.value(record)
    return text if value is None else Amount(text, value)


class _Lines(Table):
    """The lines of a function, in their order."""

    __slots__ = ()

    def arranged(self, top: int | None, sort: str | None) -> Self:
        """Asked for the first ones of some order, those that ran are meant."""
        if top is None and sort is None:
            return self
        ran = replace(self, rows=[row for row in self.rows if any(row[1:-1])])
        return super(_Lines, ran).arranged(top, sort)


def _heading(title: str) -> str:
    # as pytorch_memlab has it
    return f"## {title}" if title else ""
