"""The three looks of a memory report; the plain one has the layout of pytorch_memlab's table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenure._show import Column, html_table, rich_table
from tenure._text import format_bytes

from ._mem_report import UNEXPLAINED, DeviceReport, MemReport

if TYPE_CHECKING:
    from rich.console import Group

    from .._owners import TensorRow

_COLUMNS = (
    Column("Element type"),
    Column("Size", ">"),
    Column("Used MEM", ">"),
    Column("Category"),
    Column("Created at"),
)
_SUMS = (Column("Category"), Column("Used MEM", ">"))
_MIN_WIDTHS = (39, 19, 9)
_GAP = " "


def mem_text(report: MemReport) -> str:
    """The report as lines."""
    widths = _widths(report)
    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    lines = [_line([column.heading for column in _COLUMNS], widths)]
    for device in report.devices:
        lines += [rule, f"Storage on {device.device}"]
        lines += (_line(_cells(row, verbose=report.verbose), widths) for row in device.rows)
        lines += [rule, _total_line(device)]
        lines += (_line([name, "", size, "", ""], widths) for name, size in _sums(device))
        lines += _allocator_lines(device)
    lines.append(rule)
    return "\n".join(lines)


def mem_rich(report: MemReport) -> Group:
    """The report as rich tables, two for each device."""
    from rich.console import Group

    tables = []
    for device in report.devices:
        rows = [_cells(row, verbose=report.verbose) for row in device.rows]
        tables.append(rich_table(f"Storage on {device.device}", _COLUMNS, rows))
        tables.append(rich_table(_total_line(device), _SUMS, _sums(device)))
    return Group(*tables)


def mem_html(report: MemReport) -> str:
    """The report as HTML tables, two for each device."""
    tables = []
    for device in report.devices:
        rows = [_cells(row, verbose=report.verbose) for row in device.rows]
        tables.append(html_table(f"Storage on {device.device}", _COLUMNS, rows))
        tables.append(html_table(_total_line(device), _SUMS, _sums(device)))
    return "".join(tables)


def _cells(row: TensorRow, *, verbose: bool) -> list[str]:
    name = f"{row.name}(->{row.owner})" if verbose and row.owner is not None else row.name
    size = f"({', '.join(map(str, row.shape))}{',' if len(row.shape) == 1 else ''})"
    return [name, size, format_bytes(row.n_bytes), row.category, row.created_at or ""]


def _total_line(device: DeviceReport) -> str:
    used = format_bytes(sum(row.n_bytes for row in device.rows))
    return f"Total Tensors: {device.n_elements} \tUsed Memory: {used}"


def _sums(device: DeviceReport) -> list[tuple[str, str]]:
    found = [(name, n_bytes) for name, n_bytes in device.categories.items() if n_bytes]
    found += [(UNEXPLAINED, device.unexplained_bytes), ("total", device.total_bytes)]
    return [(name, format_bytes(n_bytes)) for name, n_bytes in found]


def _allocator_lines(device: DeviceReport) -> list[str]:
    if not device.is_counted:
        return [f"The total is that of the storages found: {device.device} counts no live bytes."]
    lines = [
        f"The allocated memory on {device.device}: {format_bytes(device.total_bytes)}, of "
        f"{format_bytes(device.reserved_bytes or 0)} that the allocator has reserved."
    ]
    cached_bytes = (device.reserved_bytes or 0) - device.total_bytes
    if device.largest_free_bytes is not None and cached_bytes > 0:
        lines.append(
            f"Free of that: {format_bytes(cached_bytes)}, the largest block "
            f"{format_bytes(device.largest_free_bytes)}; beside blocks in use, where "
            f"empty_cache() can't reach it: {format_bytes(device.inactive_split_bytes or 0)}."
        )
    if device.device_used_bytes is not None:
        used = format_bytes(device.device_used_bytes)
        lines.append(f"In use on {device.device} by all processes and the driver: {used}.")
    return lines


def _widths(report: MemReport) -> list[int]:
    rows = [_cells(row, verbose=report.verbose) for device in report.devices for row in device.rows]
    minimum = (*_MIN_WIDTHS, *(len(column.heading) for column in _COLUMNS[3:]))
    found = [max(least, *(len(row[i]) for row in rows), 0) for i, least in enumerate(minimum)]
    has_sites = any(row[-1] for row in rows)
    return found if has_sites else found[:-1]


def _line(cells: list[str], widths: list[int]) -> str:
    padded = (
        f"{cell:{column.side}{width}}"
        for cell, column, width in zip(cells, _COLUMNS, widths, strict=False)
    )
    return _GAP.join(padded).rstrip()
