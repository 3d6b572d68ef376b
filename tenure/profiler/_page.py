"""Pages on which a recording, or a timeline alone, draws itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenure._show import Amounts, Drawing, Fact, Paragraph, Section, bands, drawn_page, flame, grid
from tenure._text import counted, describe_elements, format_bytes

if TYPE_CHECKING:
    from ._recording import Recording
    from ._timeline import TimelineReport, Track

# A page with more is slow to open, and nobody reads so far.
_MOST_ROWS = 2000
_OVER_TIME = (
    "How many bytes were in use at each moment: the higher, the more. Each band is one category, "
    "scope or line, as the switch says; bars below the axis are scopes while they were open."
)
_AT_PEAK = (
    "Whose the memory was when the most was in use. The wider a box, the more bytes; what stands "
    "below a box is what it is made of."
)
_LEAKS = (
    "Tensors that outlived their scope, and each chain that holds them, from a name of the "
    "program to the tensor. What grew held more from step to step."
)
_LINES = (
    "What each line of the profiled functions allocated and freed, and the most that was in use "
    "while it ran."
)
_AT_END = "The tensors that were alive when the program ended, by name."
_ORDERS = (("scope", "line", "category"), ("line", "category"), ("category", "scope", "line"))
_PEAK_COLUMNS = {
    "category": "name",
    "scope": "text",
    "made at": "place",
    "storages": "count",
    "bytes": "bytes",
}
_LEAK_COLUMNS = {
    "tensor": "text",
    "bytes": "bytes",
    "outlived": "text",
    "created at": "place",
    "held by": "lines",
}
_GROWTH_COLUMNS = {
    "grew": "place",
    "by bytes": "bytes",
    "in steps": "count",
    "what it says": "text",
}
_END_COLUMNS = {
    "category": "name",
    "name": "place",
    "elements": "text",
    "created at": "place",
    "bytes": "bytes",
}


def timeline_page(timeline: TimelineReport) -> str:
    """A page that draws a timeline, and needs no other file and no network."""
    return drawn_page(
        "Memory over time",
        _over_time(timeline.devices, timeline),
        told=f"{timeline.duration_s:.2f} s",
        facts=_facts(timeline.devices, timeline),
        otherwise=timeline._repr_html_(),
    )


def recording_page(recording: Recording) -> str:
    """A page that draws what a recording has, and needs no other file and no network."""
    tracks, oom, memory = recording.over_time, recording.oom, recording.memory
    leaks = [report for report in recording.leaks if report]
    drawn = {track.device for track in tracks}
    others = [(name, n) for name, n in recording.peaks.items() if name not in drawn]
    facts = _facts(tracks, recording.timeline)
    facts += [(f"peak of {name}", format_bytes(n_bytes), "", False) for name, n_bytes in others]
    if leaks:
        n_bytes, n = sum(report.total_bytes for report in leaks), sum(map(len, leaks))
        facts.append(("leaked", format_bytes(n_bytes), counted(n, "tensor"), True))
    for grown in [each for each in recording.growth if each.n_steps][:1]:
        facts.append(("grew", format_bytes(grown.grown_bytes), grown.name, True))
    if oom is not None:
        cause, _, rest = oom.first_line.partition(": ")
        facts.append(("why memory ran out", cause, rest, True))
    kind, _, rest = recording.ended.partition(": ")
    facts.append(("ended with", kind, rest, recording.exit_code not in (0, None)))
    notes = [Paragraph("", "\n".join(recording.notes)).html()] if recording.notes else []
    lines = [] if recording.lines is None else [recording.lines._repr_html_()]
    sections: list[Section] = [
        ("Out of memory", "Why memory ran out.", [] if oom is None else [oom._repr_html_()]),
        *_over_time(tracks, recording.timeline),
        ("Leaks and growth", _LEAKS, [*_growth(recording.growth), *_leaks(leaks)]),
        ("Source lines", _LINES, lines),
        ("At the end", _AT_END, [] if memory is None else [*_at_end(memory)]),
        ("Notes", "What could not be seen, and why.", notes),
    ]
    versions = (f"{name} {version}" for name, version in recording.versions.items())
    return drawn_page(
        recording.title(),
        sections,
        told=", ".join(filter(None, (recording.began_at, *versions))),
        facts=facts,
        otherwise=recording._repr_html_(),
    )


def _facts(devices: Sequence[Track], timeline: TimelineReport | None) -> list[Fact]:
    """The peaks, and how often memory ran out."""
    facts: list[Fact] = []
    for device in devices:
        when, most = f"after {device.peak_at_s:.2f} s", device.largest()
        told = f"{when}; of it {most}" if most else when
        facts.append((f"peak of {device.device}", format_bytes(device.peak_bytes), told, False))
    if timeline is not None and timeline.ooms:
        first = f"first after {timeline.ooms[0].at_s:.2f} s"
        facts.append(("ran out of memory", counted(len(timeline.ooms), "time"), first, True))
    return facts


def _over_time(devices: Sequence[Track], timeline: TimelineReport | None) -> list[Section]:
    """The drawings of a timeline, or of levels alone; and what it could not see."""
    used = [device for device in devices if device.times_s]
    parts: list[Drawing | str] = [_chart(device, timeline) for device in used]
    if timeline is not None:
        times_s, rss_bytes = timeline.host.times_s, timeline.host.rss_bytes
        if times_s:
            title = f"Host: {format_bytes(max(rss_bytes))} resident in the process at most"
            ways = {"part": {"resident": rss_bytes}}
            parts.append(bands(title, times_s, rss_bytes, ways, timeline.duration_s))
        if timeline.notes:
            told = "\n".join(f"Note: {note}" for note in timeline.notes)
            parts.append(Paragraph("", told).html())
    peaks = [part for device in used if device.at_peak for part in _peak(device)]
    return [("Memory over time", _OVER_TIME, parts), ("At the peak", _AT_PEAK, peaks)]


def _chart(device: Track, timeline: TimelineReport | None) -> Drawing:
    title = (
        f"{device.device}: {format_bytes(device.peak_bytes)} in use at the peak, after "
        f"{device.peak_at_s:.2f} s"
    )
    # a snapshot of torch has the sum alone
    told = {way: getattr(device, f"by_{way}", None) for way in ("category", "scope", "line")}
    ways: Mapping[str, Any] = {way: series for way, series in told.items() if series}
    ways = ways or {"memory": {"in use": device.live_bytes}}
    if timeline is None:
        return bands(title, device.times_s, device.live_bytes, ways, device.times_s[-1])
    return bands(
        title,
        device.times_s,
        device.live_bytes,
        ways,
        timeline.duration_s,
        [(each.name, each.depth, each.begin_s, each.end_s) for each in timeline.scopes],
        [(oom.at_s, oom.text) for oom in timeline.ooms],
    )


def _peak(device: Track) -> tuple[Drawing, Drawing]:
    rows = sorted(device.at_peak, key=lambda row: -row.n_bytes)
    flames = [
        (
            {"category": [row.category], "scope": [row.scope], "line": row.stack},
            row.n_bytes,
            row.n_storages,
        )
        for row in rows
    ]
    cells = [
        # no number of storages where no tensor shows them
        (row.category, row.scope, "".join(row.stack[-1:]), row.n_storages or None, row.n_bytes)
        for row in rows
    ]
    when = f"{device.device} after {device.peak_at_s:.2f} s"
    title = f"{counted(len(rows), 'place')} that had memory of {device.device} then"
    return (
        flame(when, flames, _ORDERS, "category", "storages"),
        grid(title, _PEAK_COLUMNS, cells, colour="category"),
    )


def _growth(growth: Sequence[Any]) -> Iterator[Drawing]:
    if growth:
        rows = [(each.name, each.grown_bytes, each.n_steps or None, str(each)) for each in growth]
        yield grid("What grew from step to step", _GROWTH_COLUMNS, rows)


def _leaks(leaks: Sequence[Any]) -> Iterator[Drawing]:
    if not leaks:
        return
    records = [(record, report.scope) for report in leaks for record in report]
    records.sort(key=lambda pair: -pair[0].nbytes)
    rows = [
        (
            str(record),
            record.nbytes,
            scope,
            record.created_at or "",
            [*record.holders, *([f"the graph of {record.graph}"] if record.graph else [])],
        )
        for record, scope in records[:_MOST_ROWS]
    ]
    n_bytes = format_bytes(sum(report.total_bytes for report in leaks))
    title = f"{counted(len(records), 'tensor')} leaked, {n_bytes}"
    yield grid(title, _LEAK_COLUMNS, rows, note=_rest(len(records)))


def _at_end(memory: Any) -> Iterator[Drawing | str]:
    for device in memory.devices:
        rows = [row for row in device.rows if row.counted_bytes]
        rows.sort(key=lambda row: -row.n_bytes)
        if not rows:
            continue
        amounts = [*device.categories.items(), ("unexplained", device.unexplained_bytes)]
        yield Amounts(f"{device.device}: {format_bytes(device.total_bytes)}", amounts).html()
        cells = [
            (
                row.category,
                row.label,
                describe_elements(row.dtype, row.shape),
                row.created_at or "",
                row.n_bytes,
            )
            for row in rows[:_MOST_ROWS]
        ]
        note = _rest(len(rows))
        yield grid(f"Tensors on {device.device}", _END_COLUMNS, cells, "category", note)


def _rest(n: int) -> str:
    more = n - _MOST_ROWS
    return f"And {counted(more, 'smaller one')}." if more > 0 else ""
