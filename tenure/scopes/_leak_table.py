"""A leak report for rich terminals and for notebooks; every text in it is escaped."""

import html
from typing import TYPE_CHECKING

from ._leak_groups import SavedTensors, grouped

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
    for row in grouped(report.records):
        # as Text: brackets in plain strings are markup
        table.add_row(*(Text("\n".join(cell)) for cell in _cells(row)))
    return table


def leak_html(report: "LeakReport") -> str:
    """The report as an HTML table, captioned with its summary."""
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    rows = "".join(f"<tr>{_html_cells(row)}</tr>" for row in grouped(report.records))
    caption = html.escape(report.summary())
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table>"


def _html_cells(row: "LeakRecord | SavedTensors") -> str:
    cells = ("<br>".join(map(html.escape, cell)) for cell in _cells(row))
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _cells(row: "LeakRecord | SavedTensors") -> tuple[list[str], ...]:
    if isinstance(row, SavedTensors):
        largest = row.largest
        tensors = [row.summary(), f"the largest {largest}"]
        return (tensors, [largest.created_at or ""], [largest.kind], [f"the graph of {row.graph}"])
    return ([str(row)], [row.created_at or ""], [row.kind], list(row.holders))
