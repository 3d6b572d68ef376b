"""A table with a row for each time of each device, for spreadsheets and data frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenure._report_files import csv_text

from .._timeline_report import TimelineReport


def csv_table(report: TimelineReport) -> str:
    """The text of a ``.csv``: device, seconds, live bytes, and the bytes of each category."""
    return csv_text(_rows(report))


def _rows(report: TimelineReport) -> Iterator[Sequence[object]]:
    categories = list(dict.fromkeys(name for each in report.devices for name in each.by_category))
    yield ["device", "seconds", "live bytes", *categories]
    for device in report.devices:
        for i, (at_s, n_bytes) in enumerate(zip(device.times_s, device.live_bytes, strict=True)):
            parts = [device.by_category[c][i] if c in device.by_category else 0 for c in categories]
            yield [device.device, f"{at_s:.9f}", n_bytes, *parts]
