"""Profiled lines as tables to sort, with bars behind their bytes."""

from __future__ import annotations

from tenure._show import Grid, GridColumn, Paragraph

from .._lines import LineRecord, RecordsDisplay

_WHOLE_NAMES = {"alloc": "allocated"}


def tables_of(display: RecordsDisplay) -> list[Grid | Paragraph]:
    """A table for each function on each device; the source's order until one sorts."""
    columns = [
        GridColumn("line", "count"),
        GridColumn("code", "code"),
        *(
            GridColumn(
                _WHOLE_NAMES.get(column.name, column.name),
                "bytes" if column.in_bytes else "count",
                has_bar=column.in_bytes,
            )
            for column in display.columns
        ),
    ]
    tables: list[Grid | Paragraph] = []
    for section in display.sections:
        if section.note:
            tables.append(Paragraph(section.title, section.note))
            continue
        rows = [(line, source, *_cells(record, display)) for line, source, record in section.rows]
        tables.append(Grid(section.title, columns, rows, note=section.footnote, n_first=200))
    return tables


def _cells(record: LineRecord | None, display: RecordsDisplay) -> list[tuple[int, str] | None]:
    """The numbers, each as the line profiler spells it: some are bounds."""
    if record is None:
        return [None] * len(display.columns)
    values = ((column.value(record), column.cell(record)) for column in display.columns)
    return [None if value is None else (value, text) for value, text in values]
