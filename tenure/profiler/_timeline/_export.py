"""Files of other tools, by the end of a file's name.

Another format is one more entry of ``WRITERS``, in which a recording writes its timeline as well.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tenure._errors import ProfilerUsageError
from tenure._report_files import write_whole
from tenure._show import drawn_page
from tenure._text import listed

from ._timeline_report import DeviceTimeline, TimelineReport

_US = 1e6
# Kineto's times count from the last quarter of a year; a year has 365.2425 days.
# https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp
_QUARTER_NS = 7_889_238 * 1_000_000_000
_SCOPES = "scopes"
_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"
# The unpickler of memory_viz, in JavaScript, knows protocols 2 to 4.
_PROTOCOL = 4
# of a cell itself no function is told
_FRAME = re.compile(r"(?P<file>.*)(?::|, line )(?P<line>\d+)(?: in (?P<name>.*))?")
_FIRST_ADDRESS = 1 << 32

Writer = Callable[[Any], str | bytes]
"""Gives the text or the bytes of a whole file."""


def write_as_named(source: Any, path: str | Path, writers: Mapping[str, Writer]) -> Path:
    """Write something in the format that the end of the file's name asks for.

    Raises:
        ProfilerUsageError: there is no such format.
        OSError: it can't be written; there is nothing of it then.
    """
    path = Path(path)
    ending = max(filter(path.name.lower().endswith, writers), key=len, default="")
    if not ending:
        raise ProfilerUsageError(
            f"export() got {path.name!r}, and there is no format for that ending; nothing was "
            f"written. There are {listed(sorted(writers), len(writers))}."
        )
    content = writers[ending](source)
    # names may have halves of characters
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    return write_whole(path, data)


def _speedscope_profile(report: TimelineReport) -> str:
    """Return the calls that made what is in use at the peak, a profile for each device."""
    frames: dict[str, int] = {}
    profiles = []
    for device in report.devices:
        rows = [row for row in device.at_peak if row.n_bytes]
        samples = []
        for row in rows:
            scope = [f"scope {row.scope}"] if row.scope else []
            names = (*scope, *row.stack, row.category)
            samples.append([frames.setdefault(name, len(frames)) for name in names])
        profiles.append(
            {
                "type": "sampled",
                "name": f"in use at the peak of {device.device}",
                "unit": "bytes",
                "startValue": 0,
                "endValue": sum(row.n_bytes for row in rows),
                "samples": samples,
                "weights": [row.n_bytes for row in rows],
            }
        )
    return json.dumps(
        {
            "$schema": _SPEEDSCOPE,
            "name": "tenure timeline",
            "exporter": "tenure",
            "activeProfileIndex": 0,
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": profiles,
        }
    )


def _chrome_trace(report: TimelineReport) -> str:
    """Return counters of live bytes, which stand below the operators of torch.profiler's file.

    Both files count from the same time, so a list of events of one can be appended to the other's.
    """
    base_ns = report.began_at_ns // _QUARTER_NS * _QUARTER_NS
    began_us = (report.began_at_ns - base_ns) / 1000

    def event(kind: str, name: str, at_s: float, **more: Any) -> dict[str, Any]:
        head = {"ph": kind, "name": name, "pid": os.getpid(), "tid": _SCOPES}
        return {**head, "ts": began_us + at_s * _US, **more}

    events = [event("M", "thread_name", 0.0, args={"name": _SCOPES})]
    for device in report.devices:
        for i, at_s in enumerate(device.times_s):
            args = {name: series[i] for name, series in device.by_category.items()}
            events.append(event("C", f"live bytes on {device.device}", at_s, args=args))
    for span in report.scopes:
        dur = (span.end_s - span.begin_s) * _US
        events.append(event("X", span.name, span.begin_s, cat="scope", dur=dur))
    for oom in report.ooms:
        told = {"error": oom.text}
        events.append(event("i", "out of memory", oom.at_s, s="g", cat="oom", args=told))
    for at_s, n_bytes in zip(report.host.times_s, report.host.rss_bytes, strict=True):
        events.append(event("C", "resident memory of the process", at_s, args={"bytes": n_bytes}))
    return json.dumps(
        {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_ns,
            "traceEvents": events,
        }
    )


def _memory_viz_pickle(report: TimelineReport) -> bytes:
    """Return a snapshot as ``torch.cuda.memory`` writes it, for ``torch.cuda._memory_viz``.

    All that a line has is one block, which is freed and allocated anew where its bytes change.
    Between two times all is freed before anything is allocated: the sum in the viewer is never more
    than the level, and is its peak at the peak. Addresses are made up, and none is used twice. What
    is left at the end is freed, so the snapshot has no segments.
    """
    # The host is one device more, the last: the numbers of the others are their indices.
    order = sorted(report.devices, key=lambda each: (each.device == "cpu", each.device))
    began_us = report.began_at_ns / 1000
    marks = [
        (span.name, stage, at_s)
        for span in report.scopes
        for stage, at_s in (("START", span.begin_s), ("END", span.end_s))
    ]
    snapshot = {
        "segments": [],
        "device_traces": [_traced(device, began_us) for device in order],
        "allocator_settings": {},
        # torch's own snapshots have devices of one kind, by their number
        "tenure_devices": [each.device for each in order],
        "external_annotations": [
            {"name": name, "stage": stage, "device": 0, "time_us": int(began_us + at_s * _US)}
            for name, stage, at_s in marks
        ],
    }
    return pickle.dumps(snapshot, protocol=_PROTOCOL)


def _traced(device: DeviceTimeline, began_us: float) -> list[dict[str, Any]]:
    """Return the events of a device."""
    # The calls that led to each line, innermost first, as far as they are known at the peak.
    frames = {
        row.stack[-1]: [_frame(name) for name in reversed(row.stack)]
        for row in reversed(device.at_peak)
        if row.stack
    }
    events: list[dict[str, Any]] = []
    # by line: the address and the bytes
    blocks: dict[str, tuple[int, int]] = {}
    end = _FIRST_ADDRESS

    def note(action: str, name: str, at_s: float) -> None:
        address, n_bytes = blocks[name]
        events.append(
            {
                "action": action,
                "addr": address,
                "size": n_bytes,
                "stream": 0,
                "time_us": int(began_us + at_s * _US),
                "frames": frames.get(name) or [_frame(name)],
            }
        )

    # a viewer can't draw a trace without events
    by_line = device.by_line if any(map(any, device.by_line.values())) else {"nothing": (1,)}
    # after the last time all is freed
    for i, at_s in enumerate([*device.times_s, device.times_s[-1]]):
        changed = {}
        for name, series in by_line.items():
            before = blocks[name][1] if name in blocks else 0
            n_bytes = series[i] if i < len(series) else 0
            if n_bytes != before:
                changed[name] = n_bytes
                if before:
                    note("free_requested", name, at_s)
                    note("free_completed", name, at_s)
                    del blocks[name]
        for name, n_bytes in changed.items():
            if n_bytes:
                blocks[name] = end, n_bytes
                note("alloc", name, at_s)
                end += n_bytes
    return events


def _frame(name: str) -> dict[str, Any]:
    found = _FRAME.fullmatch(name)
    if found is None:
        return {"filename": "", "line": 0, "name": name}
    line, function = int(found["line"]), found["name"] or "<module>"
    return {"filename": found["file"], "line": line, "name": function}


def _drawn_page(report: TimelineReport) -> str:
    return drawn_page("Memory over time", report.to_dict(), report._repr_html_())


WRITERS: dict[str, Writer] = {
    ".pickle": _memory_viz_pickle,
    ".speedscope.json": _speedscope_profile,
    ".json": _chrome_trace,
    ".trace.json": _chrome_trace,
    ".html": _drawn_page,
}
"""By extension; the longest that a name ends with counts."""
