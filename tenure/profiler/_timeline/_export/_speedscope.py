"""A speedscope profile: which calls made what is in use at the peak, a profile for each device."""

from __future__ import annotations

import json
from typing import Any

from .._timeline_report import PeakRow, TimelineReport

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope_profile(report: TimelineReport) -> str:
    """The text of a ``.speedscope.json``."""
    frames: dict[str, int] = {}
    profiles = []
    for device in report.devices:
        rows = [row for row in device.at_peak if row.n_bytes]
        samples = [
            [frames.setdefault(name, len(frames)) for name in _frames_of(row)] for row in rows
        ]
        profile: dict[str, Any] = {
            "type": "sampled",
            "name": f"in use at the peak of {device.device}",
            "unit": "bytes",
            "startValue": 0,
            "endValue": sum(row.n_bytes for row in rows),
            "samples": samples,
            "weights": [row.n_bytes for row in rows],
        }
        profiles.append(profile)
    return json.dumps(
        {
            "$schema": _SCHEMA,
            "name": "tenure timeline",
            "exporter": "tenure",
            "activeProfileIndex": 0,
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": profiles,
        }
    )


def _frames_of(row: PeakRow) -> list[str]:
    """The calls, outermost first, and what was made there as the innermost."""
    scope = [f"scope {row.scope}"] if row.scope else []
    return [*scope, *row.stack, row.category]
