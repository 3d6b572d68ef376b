"""A Chrome trace: counters of live bytes that stand below the operators of torch.profiler's file.

Both files count from the same time, so a list of events of one can be appended to that of the
other.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .._timeline_report import DeviceTimeline, TimelineReport

# Kineto's times count from the last quarter of a year; a year has 365.2425 days.
# https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp
_QUARTER_S = 7_889_238
_NS_PER_S = 1_000_000_000
_US_PER_S = 1e6
_SCOPES = "scopes"


def chrome_trace(report: TimelineReport) -> str:
    """The text of a ``.json`` for chrome://tracing or ui.perfetto.dev."""
    base_ns = report.began_at_ns // _NS_PER_S // _QUARTER_S * _QUARTER_S * _NS_PER_S
    began_us = (report.began_at_ns - base_ns) / 1000
    pid = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": _SCOPES, "name": "thread_name", "args": {"name": _SCOPES}}
    ]
    for device in report.devices:
        events += _counters(device, began_us, pid)
    events += [
        {
            "ph": "X",
            "cat": "scope",
            "name": span.name,
            "pid": pid,
            "tid": _SCOPES,
            "ts": began_us + span.begin_s * _US_PER_S,
            "dur": (span.end_s - span.begin_s) * _US_PER_S,
        }
        for span in report.scopes
    ]
    events += [
        {
            "ph": "i",
            "s": "g",
            "cat": "oom",
            "name": "out of memory",
            "pid": pid,
            "tid": _SCOPES,
            "ts": began_us + oom.at_s * _US_PER_S,
            "args": {"error": oom.text},
        }
        for oom in report.ooms
    ]
    if report.host is not None:
        events += _host_counters(report, began_us, pid)
    trace = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "traceEvents": events,
    }
    return json.dumps(trace)


def _counters(device: DeviceTimeline, began_us: float, pid: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "C",
            "name": f"live bytes on {device.device}",
            "pid": pid,
            "ts": began_us + at_s * _US_PER_S,
            "args": {name: series[i] for name, series in device.by_category.items()},
        }
        for i, at_s in enumerate(device.times_s)
    ]


def _host_counters(report: TimelineReport, began_us: float, pid: int) -> list[dict[str, Any]]:
    host = report.host
    assert host is not None
    return [
        {
            "ph": "C",
            "name": "resident memory of the process",
            "pid": pid,
            "ts": began_us + at_s * _US_PER_S,
            "args": {"bytes": n_bytes},
        }
        for at_s, n_bytes in zip(host.times_s, host.rss_bytes, strict=True)
    ]
