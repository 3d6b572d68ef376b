"""A leak report for rich terminals and for notebooks; every text in it is escaped."""

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from ._leaks import LeakRecord, LeakReport

_HEADINGS = ("tensor", "created at", "kind", "held by")


def leak_table(report: "LeakReport") -> "Table":
    """The report as a rich table, titled with its summary."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(report.summary()), title_justify="left", show_lines=True)
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for record in report.records:
        # as Text: brackets in plain strings are markup
        table.add_row(*(Text("\n".join(cell)) for cell in _cells(record)))
    return table


def leak_html(report: "LeakReport") -> str:
    """The report as an HTML table, captioned with its summary."""
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    rows = "".join(f"<tr>{_html_cells(record)}</tr>" for record in report.records)
    caption = html.escape(report.summary())
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table>"


def _html_cells(record: "LeakRecord") -> str:
    cells = ("<br>".join(map(html.escape, cell)) for cell in _cells(record))
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _cells(record: "LeakRecord") -> tuple[list[str], ...]:
    return ([str(record)], [record.created_at or ""], [record.kind], list(record.holders))
