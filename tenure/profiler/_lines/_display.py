"""A line profile to look at: as text, in a rich terminal, in a notebook."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ._columns import Column
from ._records import LineRecord

if TYPE_CHECKING:
    from rich.console import RenderableType

_RIGHT = "code"


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

    def cells(self, columns: Sequence[Column]) -> list[list[str]]:
        """The texts of each row."""
        return [
            [str(line), *(column.cell(record) if record else "" for column in columns), source]
            for line, source, record in self.rows
        ]


class RecordsDisplay:
    """Records with the source around them; it shows itself wherever it is printed."""

    def __init__(self, sections: Sequence[Section], columns: Sequence[Column]) -> None:
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
        return ["line", *(column.name for column in self.columns), _RIGHT]

    def __str__(self) -> str:
        return "\n\n".join(self._text(section) for section in self.sections)

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> RenderableType:
        from ._line_tables import rich_tables

        return rich_tables(self)

    def _repr_html_(self) -> str:
        from ._line_tables import html_tables

        return html_tables(self)

    def _text(self, section: Section) -> str:
        if section.note:
            return "\n".join(line for line in (_title(section), section.note) if line)
        table = [self.headings, *section.cells(self.columns)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [_title(section)]
        for *cells, source in table:
            numbers = "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=False))
            lines.append(f"{numbers}  {source}".rstrip())
        if section.footnote:
            lines.append(section.footnote)
        return "\n".join(lines)


def section_of(
    name: str, file: str, first_line: int, source: Sequence[str], records: Sequence[LineRecord]
) -> Section:
    """The section of a function's records, all of one device; lines without source stand alone."""
    by_line = {record.line: record for record in records}
    code = textwrap.dedent("\n".join(source)).split("\n") if source else []
    texts = dict(enumerate(code, first_line))
    lines = sorted(texts | by_line)
    rows = tuple((line, texts.get(line, ""), by_line.get(line)) for line in lines)
    return Section(title_of(name, file, first_line, records[0].device), rows)


def title_of(name: str, file: str, first_line: int, device: torch.device | None = None) -> str:
    """What a function is called above its table."""
    place = f"{name}, {os.path.basename(file)}:{first_line}"
    return f"{place}, {device}" if device is not None else place


def _title(section: Section) -> str:
    return f"## {section.title}" if section.title else ""
