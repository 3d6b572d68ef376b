"""The page of a recording: how it ended, memory over time, the peak, leaks, lines, the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from tenure._show import Amounts, Fact, Grid, GridColumn, Part, Section, Shown, drawn_page
from tenure._text import counted, describe_elements, format_bytes
from tenure.scopes import LeakReport

from .._lines import RecordsDisplay
from .._reports import MemReport
from ._line_tables import tables_of
from ._timeline_page import facts_of
from ._timeline_sections import TimelineFacts, Track, TracksAlone, notes_of, sections_of

# A page with more is slow to open, and nobody reads so far.
_MOST_ROWS = 2000
_OOM = "Why memory ran out, and what there was of it then."
_LEAKS = (
    "Tensors that outlived their scope, and each chain that holds them, from a name of the "
    "program to the tensor. What grew held more from step to step."
)
_LINES = (
    "What each line of the profiled functions allocated and freed, and the most that was in use "
    "while it ran. A bar shows the part of the largest."
)
_AT_END = "The tensors that were alive when the program ended, by name."
_LEAK_COLUMNS = (
    GridColumn("tensor"),
    GridColumn("bytes", "bytes", has_bar=True),
    GridColumn("outlived"),
    GridColumn("created at", "place"),
    GridColumn("held by", "lines"),
)
_GROWTH_COLUMNS = (
    GridColumn("grew", "place"),
    GridColumn("by bytes", "bytes", has_bar=True),
    GridColumn("in steps", "count"),
    GridColumn("what it says"),
)
_END_COLUMNS = (
    GridColumn("category", "name"),
    GridColumn("name", "place"),
    GridColumn("elements"),
    GridColumn("created at", "place"),
    GridColumn("bytes", "bytes", has_bar=True),
)


class Grown(Protocol):
    """A place that held more from step to step; ``str()`` tells it in words."""

    @property
    def name(self) -> str:
        """The variable, attribute or container."""
        ...

    @property
    def grown_bytes(self) -> int:
        """By how much."""
        ...

    @property
    def n_steps(self) -> int:
        """In how many steps."""
        ...


class OomFacts(Protocol):
    """What a page asks of an OOM's report, which also shows itself."""

    @property
    def first_line(self) -> str:
        """The cause and the remedy."""
        ...


def recording_page(
    title: str,
    *,
    told: str = "",
    ended: str = "",
    failed: bool = False,
    peaks: Mapping[str, int] | None = None,
    timeline: TimelineFacts | None = None,
    tracks: Sequence[Track] = (),
    leaks: Sequence[LeakReport] = (),
    growth: Sequence[Grown] = (),
    lines: RecordsDisplay | None = None,
    oom: OomFacts | None = None,
    memory: MemReport | None = None,
    notes: Sequence[str] = (),
    otherwise: str = "",
) -> str:
    """A page that draws what a recording has of all this, and needs no network and no other file.

    Args:
        title: the command that was recorded.
        told: when it ran, with which versions.
        ended: how it ended; ``failed`` if that was an error.
        failed: see there.
        peaks: the most bytes of each device, where there is no timeline of it.
        timeline: memory over time.
        tracks: the same, where there is no timeline: levels of a snapshot of torch.
        leaks: reports of scopes that let tensors out.
        growth: what held more from step to step.
        lines: the records of profiled lines.
        oom: why memory ran out.
        memory: what was alive at the end.
        notes: what could not be seen.
        otherwise: HTML for browsers that run no script: what the recording shows in a notebook.
    """
    if timeline is None and tracks:
        ends = (each.times_s[-1] for each in tracks if each.times_s)
        timeline = TracksAlone(tracks, max(ends, default=0.0))
    found = [report for report in leaks if report]
    facts = [*_peaks(peaks or {}, timeline), *_leak_facts(found, growth)]
    if ended:
        kind, _, rest = ended.partition(": ")
        facts.append(Fact("ended with", kind, rest, failed))
    sections = [
        *([] if oom is None else [_oom_section(oom)]),
        *([] if timeline is None else sections_of(timeline)),
        Section("Leaks and growth", _LEAKS, list(_leak_parts(found, growth))),
        Section("Source lines", _LINES, [] if lines is None else tables_of(lines)),
        Section("At the end", _AT_END, [] if memory is None else list(_end_parts(memory))),
        Section("Notes", "What could not be seen, and why.", list(notes_of(notes))),
    ]
    return drawn_page(title, sections, told=told, facts=facts, otherwise=otherwise)


def _peaks(peaks: Mapping[str, int], timeline: TimelineFacts | None) -> Iterator[Fact]:
    drawn = set() if timeline is None else {device.device for device in timeline.devices}
    if timeline is not None:
        yield from facts_of(timeline)
    for device, n_bytes in peaks.items():
        if device not in drawn:
            yield Fact(f"peak of {device}", format_bytes(n_bytes))


def _leak_facts(leaks: Sequence[LeakReport], growth: Sequence[Grown]) -> Iterator[Fact]:
    if leaks:
        n_bytes, n = sum(report.total_bytes for report in leaks), sum(map(len, leaks))
        yield Fact("leaked", format_bytes(n_bytes), counted(n, "tensor"), True)
    if growing := [each for each in growth if each.n_steps]:
        largest = growing[0]
        yield Fact("grew", format_bytes(largest.grown_bytes), largest.name, True)


def _oom_section(oom: OomFacts) -> Section:
    parts = [oom] if isinstance(oom, Shown) else []
    return Section("Out of memory", f"{_OOM}\n{oom.first_line}", parts)


def _leak_parts(leaks: Sequence[LeakReport], growth: Sequence[Grown]) -> Iterator[Grid]:
    if growth:
        grown = [(each.name, each.grown_bytes, each.n_steps or None, str(each)) for each in growth]
        yield Grid("What grew from step to step", _GROWTH_COLUMNS, grown)
    if leaks:
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
        yield Grid(title, _LEAK_COLUMNS, rows, note=_rest(len(records)))


def _end_parts(memory: MemReport) -> Iterator[Grid | Part]:
    for device in memory.devices:
        rows = sorted(
            (row for row in device.rows if row.counted_bytes), key=lambda row: -row.n_bytes
        )
        if not rows:
            continue
        amounts = [*device.categories.items(), ("unexplained", device.unexplained_bytes)]
        title = f"{device.device}: {format_bytes(device.total_bytes)}"
        yield Amounts(title, [each for each in amounts if each[1]])
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
        title = f"Tensors on {device.device}"
        yield Grid(title, _END_COLUMNS, cells, colour="category", note=_rest(len(rows)))


def _rest(n: int) -> str:
    more = n - _MOST_ROWS
    return f"And {counted(more, 'smaller one')}." if more > 0 else ""
