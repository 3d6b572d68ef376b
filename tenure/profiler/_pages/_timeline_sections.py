"""A timeline as drawings: bands over time above the scopes, flames of what the peak was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tenure._show import (
    BandChart,
    Flame,
    FlameRow,
    Grid,
    GridColumn,
    Mark,
    Paragraph,
    Section,
    Span,
)
from tenure._text import counted, format_bytes

from ._peaks import PeakRow

_OVER_TIME = (
    "How many bytes were in use at each moment: the higher, the more. Each band is one category, "
    "scope or line, as the switch says; bars below the axis are scopes while they were open."
)
_AT_PEAK = (
    "Whose the memory was when the most was in use. The wider a box, the more bytes; what stands "
    "below a box is what it is made of."
)
_ORDERS = (("scope", "line", "category"), ("line", "category"), ("category", "scope", "line"))
_COLUMNS = (
    GridColumn("category", "name"),
    GridColumn("scope"),
    GridColumn("made at", "place"),
    GridColumn("storages", "count"),
    GridColumn("bytes", "bytes", has_bar=True),
)


class Track(Protocol):
    """Live bytes of one device; a `DeviceTimeline` also has them by category, scope and line."""

    @property
    def device(self) -> str:
        """Its name."""
        ...

    @property
    def times_s(self) -> Sequence[float]:
        """Moments."""
        ...

    @property
    def live_bytes(self) -> Sequence[int]:
        """What was in use at each."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most of all."""
        ...

    @property
    def peak_at_s(self) -> float:
        """When that was."""
        ...

    @property
    def at_peak(self) -> Sequence[PeakRow]:
        """What was in use then."""
        ...


class _Span(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def begin_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


class _Oom(Protocol):
    @property
    def at_s(self) -> float: ...
    @property
    def text(self) -> str: ...


class _Host(Protocol):
    @property
    def times_s(self) -> Sequence[float]: ...
    @property
    def rss_bytes(self) -> Sequence[int]: ...
    @property
    def python_heap_bytes(self) -> Sequence[int]: ...
    @property
    def allocator_slack_bytes(self) -> Sequence[int]: ...
    @property
    def rest_bytes(self) -> Sequence[int]: ...


class TimelineFacts(Protocol):
    """What a page asks of a timeline; see `TimelineReport`."""

    @property
    def devices(self) -> Sequence[Track]:
        """The memory of each device."""
        ...

    @property
    def scopes(self) -> Sequence[_Span]:
        """When which scopes were open."""
        ...

    @property
    def ooms(self) -> Sequence[_Oom]:
        """When something ran out of memory."""
        ...

    @property
    def host(self) -> _Host | None:
        """What the process took of the host's memory."""
        ...

    @property
    def duration_s(self) -> float:
        """How long it was."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What could not be seen."""
        ...


@dataclass(frozen=True, slots=True)
class TracksAlone:
    """A timeline of which nothing but the levels is known, as in a snapshot of torch."""

    devices: Sequence[Track]
    duration_s: float
    scopes: Sequence[_Span] = ()
    ooms: Sequence[_Oom] = ()
    host: _Host | None = None
    notes: Sequence[str] = ()


def sections_of(timeline: TimelineFacts) -> list[Section]:
    """The drawings of a timeline, and what it could not see."""
    used = [device for device in timeline.devices if device.times_s]
    charts = [_chart(device, timeline) for device in used]
    if timeline.host is not None and timeline.host.times_s:
        charts.append(_chart_of_host(timeline.host, timeline.duration_s))
    peaks = [part for device in used if device.at_peak for part in _peak(device)]
    return [
        Section("Memory over time", _OVER_TIME, [*charts, *notes_of(timeline.notes)]),
        Section("At the peak", _AT_PEAK, peaks),
    ]


def notes_of(notes: Sequence[str]) -> Iterator[Paragraph]:
    """What could not be seen, where there is any."""
    if notes:
        yield Paragraph("", "\n".join(f"Note: {note}" for note in notes))


def _chart(device: Track, timeline: TimelineFacts) -> BandChart:
    return BandChart(
        f"{device.device}: {format_bytes(device.peak_bytes)} in use at the peak, after "
        f"{device.peak_at_s:.2f} s",
        device.times_s,
        device.live_bytes,
        _ways(device),
        timeline.duration_s,
        [Span(each.name, each.depth, each.begin_s, each.end_s) for each in timeline.scopes],
        "scope",
        [Mark(oom.at_s, oom.text) for oom in timeline.ooms],
    )


def _ways(device: Track) -> dict[str, Mapping[str, Sequence[int]]]:
    """What the bytes can be divided by; a snapshot of torch has the sum alone."""
    told = {way: getattr(device, f"by_{way}", None) for way in ("category", "scope", "line")}
    return {way: s for way, s in told.items() if s} or {"memory": {"in use": device.live_bytes}}


def _chart_of_host(host: _Host, duration_s: float) -> BandChart:
    others = (host.python_heap_bytes, host.allocator_slack_bytes, host.rest_bytes)
    # of tensors only what is resident: the allocator may have given out more than was written to
    tensors = [rss - sum(parts) for rss, *parts in zip(host.rss_bytes, *others, strict=True)]
    names = ("tensors", "objects of Python", "held by the C library, unused", "everything else")
    parts: dict[str, Sequence[int]] = dict(zip(names, (tensors, *others), strict=True))
    most = format_bytes(max(host.rss_bytes))
    return BandChart(
        f"Host: {most} resident in the process at most",
        host.times_s,
        host.rss_bytes,
        {"part": parts},
        duration_s,
    )


def _peak(device: Track) -> tuple[Flame, Grid]:
    rows = sorted(device.at_peak, key=lambda row: -row.n_bytes)
    flame = Flame(
        f"{device.device} after {device.peak_at_s:.2f} s",
        [
            FlameRow(
                {"category": [row.category], "scope": [row.scope], "line": row.stack},
                row.n_bytes,
                row.n_storages,
            )
            for row in rows
        ],
        _ORDERS,
        "category",
        "storages",
    )
    cells = [
        (
            row.category,
            row.scope,
            row.stack[-1] if row.stack else "",
            # none where no tensor shows it
            row.n_storages or None,
            row.n_bytes,
        )
        for row in rows
    ]
    title = f"{counted(len(rows), 'place')} that had memory of {device.device} then"
    return flame, Grid(title, _COLUMNS, cells, colour="category")
