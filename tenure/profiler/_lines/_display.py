"""A line profile to look at: as text, in a rich terminal, in a notebook."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from tenure._errors import ProfilerUsageError, ReportFormatError
from tenure._show import Bar, Column, Paragraph, Part, Report, Table, plain, restored

from ._columns import LineColumn, columns_named
from ._records import LineRecord

_CODE = Column("code", is_fixed=True, is_code=True)


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

    @property
    def headings(self) -> list[str]:
        """The names of all columns, the source's last."""
        return [column.heading for column in self._columns()]

    def __str__(self) -> str:
        return "\n\n".join(map(_text, self._parts()))

    def __repr__(self) -> str:
        return str(self)

    def _parts(self) -> list[Part]:
        columns, largest = self._columns(), [self._largest(column) for column in self.columns]
        return [
            Paragraph(section.title, section.note)
            if section.note
            else Table(section.title, columns, self._rows(section, largest), section.footnote)
            for section in self.sections
        ]

    def _columns(self) -> list[Column]:
        names = ("line", *(column.name for column in self.columns))
        return [*(Column(name, ">", is_fixed=True) for name in names), _CODE]

    def _rows(self, section: Section, largest: Sequence[int]) -> list[list[str]]:
        return [
            [
                str(line),
                *(_cell(*pair, record) for pair in zip(self.columns, largest, strict=True)),
                source,
            ]
            for line, source, record in section.rows
        ]

    def _largest(self, column: LineColumn) -> int:
        return max((column.value(record) or 0 for record in self.records), default=0)

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
    place = f"{name}, {os.path.basename(file)}:{first_line}"
    return f"{place}, {device}" if device is not None else place


def _cell(column: LineColumn, most: int, record: LineRecord | None) -> str:
    if record is None:
        return ""
    text, value = column.cell(record), column.value(record)
    # Negative numbers (net) have no part of the largest.
    return Bar(text, round(100 * value / most)) if value and value > 0 else text


def _text(part: Part) -> str:
    title = f"## {part.title}" if part.title else ""
    body = part.body(rule="") if isinstance(part, Table) else ""
    return "\n".join(filter(None, (title, body, part.note)))
