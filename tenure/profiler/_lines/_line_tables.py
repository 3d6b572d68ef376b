"""Line profiles as rich tables and as HTML with bars; every text in them is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._columns import Column
from ._records import LineRecord

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ._display import RecordsDisplay, Section

_RIGHT = 'style="text-align:right"'
_LEFT = 'style="text-align:left;white-space:pre;font-family:monospace"'
_BAR = "#9cc3e6"


def rich_tables(display: RecordsDisplay) -> Group:
    """A table for each section, one below the other."""
    from rich.console import Group
    from rich.text import Text

    parts = (
        Text("\n".join(filter(None, (section.title, section.note))))
        if section.note
        else _rich_table(display, section)
        for section in display.sections
    )
    return Group(*parts)


def html_tables(display: RecordsDisplay) -> str:
    """A table for each section; each number has a bar, as long as its part of the largest."""
    return "".join(_html_section(display, section) for section in display.sections)


def _rich_table(display: RecordsDisplay, section: Section) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(section.title), title_justify="left", caption_justify="left")
    if section.footnote:
        table.caption = Text(section.footnote)
    *numbers, source = display.headings
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(source, overflow="fold")
    for cells in section.cells(display.columns):
        table.add_row(*map(Text, cells))  # as Text: brackets in plain strings are markup
    return table


def _html_section(display: RecordsDisplay, section: Section) -> str:
    caption = html.escape(section.title)
    if section.note:
        title = f"<b>{caption}</b><br>" if caption else ""
        return f"<p>{title}{html.escape(section.note)}</p>"
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in display.headings)
    largest = [_largest(column, display.records) for column in display.columns]
    rows = "".join(
        f"<tr><td {_RIGHT}>{line}</td>{_html_numbers(display.columns, largest, record)}"
        f"<td {_LEFT}>{html.escape(source)}</td></tr>"
        for line, source, record in section.rows
    )
    footnote = f"<p>{html.escape(section.footnote)}</p>" if section.footnote else ""
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table>{footnote}"


def _html_numbers(
    columns: Sequence[Column], largest: Sequence[int], record: LineRecord | None
) -> str:
    if record is None:
        return f"<td {_RIGHT}></td>" * len(columns)
    return "".join(
        f"<td {_bar(column.value(record), most)}>{html.escape(column.cell(record))}</td>"
        for column, most in zip(columns, largest, strict=True)
    )


def _bar(value: int | None, most: int) -> str:
    if not value or value < 0:
        return _RIGHT
    percent = round(100 * value / most)
    fill = f"background:linear-gradient(90deg,{_BAR} {percent}%,transparent {percent}%)"
    return f'style="text-align:right;{fill}"'


def _largest(column: Column, records: Sequence[LineRecord]) -> int:
    return max((column.value(record) or 0 for record in records), default=0)
