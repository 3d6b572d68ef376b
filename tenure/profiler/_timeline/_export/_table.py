"""A table with a row for each time of each device, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io

from .._timeline_report import TimelineReport


def csv_table(report: TimelineReport) -> str:
    """The text of a ``.csv``: device, seconds, live bytes, and the bytes of each category."""
    categories = list(dict.fromkeys(name for each in report.devices for name in each.by_category))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["device", "seconds", "live bytes", *categories])
    for device in report.devices:
        for i, (at_s, n_bytes) in enumerate(zip(device.times_s, device.live_bytes, strict=True)):
            parts = [device.by_category[c][i] if c in device.by_category else 0 for c in categories]
            writer.writerow([device.device, f"{at_s:.9f}", n_bytes, *parts])
    return file.getvalue()
