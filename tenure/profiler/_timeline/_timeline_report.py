"""What a timeline tells: bytes over time, device by device, and whose they are at the peak.

Invariant: at each time the categories of a device add up to its level, and so do the scopes and the
lines. However long the recording was, the report has some thousand times, and the exact peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tenure._show import (
    Amount,
    Amounts,
    Column,
    Paragraph,
    Part,
    Report,
    Table,
    bytes_column,
    in_bytes,
    ranked,
)
from tenure._text import counted, format_bytes

BEFORE_STACK = ("before the recording",)
"""The stack of what was there when the recording began."""
OUTSIDE = "outside of scopes"
"""The scope of what was made in none."""
_MOST_ERRORS = 20
_BYTES = "bytes"
_Key = TypeVar("_Key")
_COLUMNS = (
    bytes_column(_BYTES),
    Column("storages", ">", spare=2, spelled=str),
    Column("category"),
    Column("scope", spare=1),
    Column("made at"),
)


@dataclass(frozen=True, slots=True)
class PeakRow:
    """Storages of one kind, from one place, that were alive at the peak.

    Attributes:
        category: what they count as.
        scope: the innermost scope that was open when they were made.
        stack: where they were made, as ``train.py:17 in step``, outermost first.
        n_bytes: their bytes.
        n_storages: how many there are; 0 for what no tensor shows.
    """

    category: str
    scope: str
    stack: tuple[str, ...]
    n_bytes: int
    n_storages: int

    @property
    def was_before(self) -> bool:
        """Whether they were there when the recording began."""
        return self.stack == BEFORE_STACK


@dataclass(frozen=True, slots=True)
class Track:
    """The live bytes of a device.

    Attributes:
        device: the device, as ``cuda:0``.
        times_s: seconds since the recording began, increasing.
        live_bytes: the most that was in use in the interval around each time.
        peak_bytes: the most of all.
        peak_at_s: when that was.
        at_peak: what was in use at the peak, the largest first.
    """

    device: str
    times_s: tuple[float, ...] = field(repr=False)
    live_bytes: tuple[int, ...] = field(repr=False)
    peak_bytes: int
    peak_at_s: float
    at_peak: tuple[PeakRow, ...] = field(repr=False)

    def largest(self) -> str:
        """Return what took most at the peak, in words; empty if no line is known."""
        # what no tensor shows has no line, nor has what was there before
        made = [row for row in self.at_peak if row.stack and not row.was_before and row.n_storages]
        found = summed(made, lambda row: (row.category or "tensors", row.stack[-1]))
        if not found:
            return ""
        (category, line), (n_bytes, _) = max(found.items(), key=lambda each: each[1][0])
        return f"{format_bytes(n_bytes)} {category}, made at {line}"


@dataclass(frozen=True, slots=True)
class DeviceTimeline(Track):
    """The memory of one device over time.

    Attributes:
        began_bytes: what was in use when the recording began, as far as tensors show it.
        by_category: the bytes of each category at these times.
        by_scope: the bytes of what was made in each scope.
        by_line: the bytes of what each line made, of the lines with the most.
    """

    began_bytes: int
    by_category: dict[str, tuple[int, ...]] = field(repr=False)
    by_scope: dict[str, tuple[int, ...]] = field(repr=False)
    by_line: dict[str, tuple[int, ...]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ScopeSpan:
    """A stretch of time in which a scope was open.

    Attributes:
        name: that of the scope, or where it was opened.
        depth: how many scopes were open around it.
        begin_s: seconds since the recording began.
        end_s: likewise.
    """

    name: str
    depth: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class OomMark:
    """Something ran out of memory.

    Attributes:
        at_s: seconds since the recording began.
        text: the first line of the error.
    """

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class HostTimeline:
    """The resident memory of the process, from time to time.

    Attributes:
        times_s: seconds since the recording began.
        rss_bytes: resident memory.
    """

    times_s: tuple[float, ...] = field(repr=False)
    rss_bytes: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class TimelineReport(Report):
    """Live memory over time, by category, scope, line and device.

    Attributes:
        devices: those that were used, the host first.
        scopes: when which scopes were open, on the thread that was recorded.
        ooms: when something ran out of memory.
        host: what the process took of the host's memory.
        n_events: how many storages were made, and died.
        duration_s: how long the recording was.
        began_at_ns: when it began, in nanoseconds of the system's clock.
        notes: what could not be seen, and why.
    """

    devices: tuple[DeviceTimeline, ...]
    scopes: tuple[ScopeSpan, ...]
    ooms: tuple[OomMark, ...]
    host: HostTimeline
    n_events: int
    duration_s: float
    began_at_ns: int
    notes: tuple[str, ...]

    def export(self, path: str | Path) -> Path:
        """Write the timeline to a file, whose name says in which format.

        Args:
            path: a name that ends in ``.pickle`` (for ``torch.cuda._memory_viz``), ``.json`` or
                ``.trace.json`` (Chrome, Perfetto), ``.speedscope.json``, or ``.html``. A file of
                that name is replaced. `Recording.export` writes ``.json`` in another
                format.

        Returns:
            The path.

        Raises:
            ProfilerUsageError: there is no such format.
        """
        from ._export import WRITERS, write_as_named

        return write_as_named(self, path, WRITERS)

    def __repr__(self) -> str:
        return f"<TimelineReport of {self.summary()}>"

    def summary(self) -> str:
        """Return the length and the peaks, in one line."""
        peaks = (
            f"{format_bytes(device.peak_bytes)} on {device.device} at {device.peak_at_s:.2f} s"
            for device in self.devices
        )
        length = f"{self.duration_s:.2f} s, {counted(self.n_events, 'event')}"
        return f"{length}: peak {', '.join(peaks)}" if self.devices else f"{length}: no memory"

    def _parts(self) -> Sequence[Part]:
        if not self.devices:
            return [Paragraph("", f"{self.summary()}.")]
        parts: list[Part] = []
        for device in self.devices:
            title = (
                f"{device.device}: {format_bytes(device.peak_bytes)} at the peak, "
                f"{device.peak_at_s:.2f} s after the beginning"
            )
            place = device.live_bytes.index(device.peak_bytes)
            amounts = [(name, series[place]) for name, series in device.by_category.items()]
            parts.append(Amounts(title, ranked(amounts)))
            if device.at_peak:
                parts.append(_table_of(device))
        if self.ooms:
            lines = "\n".join(f"{oom.at_s:.2f} s: {oom.text}" for oom in self.ooms[:_MOST_ERRORS])
            parts.append(Paragraph("Out of memory", lines))
        if self.notes:
            parts.append(Paragraph("", "\n".join(f"Note: {note}" for note in self.notes)))
        return parts


def summed(rows: Iterable[PeakRow], key: Callable[[PeakRow], _Key]) -> dict[_Key, tuple[int, int]]:
    """Return the bytes and the number of storages of rows, by a key."""
    found: dict[_Key, tuple[int, int]] = {}
    for row in rows:
        n_bytes, n = found.get(key(row), (0, 0))
        found[key(row)] = n_bytes + row.n_bytes, n + row.n_storages
    return found


def _table_of(device: DeviceTimeline) -> Table:
    """Return what was in use at the peak by category, scope and line, whatever calls led there."""

    def key(row: PeakRow) -> tuple[str, str, str]:
        # of a library what follows the folder that all are in
        line = row.stack[-1].rpartition("site-packages/")[2] if row.stack else ""
        return row.category, "" if row.scope == OUTSIDE else row.scope, line

    rows = [
        (in_bytes(n_bytes), Amount(str(n or ""), n), *names)
        for names, (n_bytes, n) in summed(device.at_peak, key).items()
    ]
    return Table(f"In use at the peak of {device.device}", _COLUMNS, rows, by=_BYTES)
