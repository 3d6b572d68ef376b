"""Runs beside each other: two of a program, or the ranks of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tenure._show import (
    Column,
    Paragraph,
    Part,
    Report,
    Table,
    by_bytes,
    bytes_column,
    in_bytes,
    signed,
)

from .._reports import place_of
from .._timeline import summed
from ._recording import MOST_ROWS, Recording
from ._tree import UNKNOWN

_RANK_COLUMNS = (
    Column("ended"),
    Column("seconds", ">", spare=1),
    Column("device"),
    Column("at most", ">"),
    Column("at the end", ">"),
)
_CHANGE = "change"
_COLUMNS = (
    Column("name"),
    bytes_column("A"),
    bytes_column("B"),
    bytes_column(_CHANGE, signed),
    Column("created at", spare=1),
)
# By name, category and site; None for what a run has not recorded.
_Sizes = Mapping[tuple[str, str, str], int] | None


@dataclass(frozen=True, slots=True)
class Change:
    """Something whose bytes differ between two runs.

    Attributes:
        name: the tensor, category or line.
        category: what it is; empty for a category and for a line.
        created_at: where it was made, if that is known; else empty.
        before_bytes: its bytes in the first run; 0 for what is new in the second.
        after_bytes: its bytes in the second run; 0 for what is gone.
    """

    name: str
    category: str
    created_at: str
    before_bytes: int
    after_bytes: int

    @property
    def change_bytes(self) -> int:
        """By how much the second run takes more."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, repr=False)
class RecordingDiff(Report):
    """The second of two runs, compared with the first.

    Attributes:
        titles: the two commands.
        durations_s: how long each ran.
        peaks: by device, the most bytes of each run.
        categories: categories that differ at the end.
        tensors: tensors that differ at the end, by name, category and site; those of one container
            together.
        lines: lines whose memory differs at the peak.
        growth: what grew from step to step, and by how much in each run, where that differs and
            both looked for it.
    """

    titles: tuple[str, str]
    durations_s: tuple[float, float]
    peaks: tuple[Change, ...]
    categories: tuple[Change, ...]
    tensors: tuple[Change, ...]
    lines: tuple[Change, ...]
    growth: tuple[Change, ...] = ()

    _is_spaced = True

    @classmethod
    def of(cls, before: Recording, after: Recording) -> RecordingDiff:
        """Compare two runs."""
        sizes = _sizes(before), _sizes(after)
        changes = {part: _changes(sizes[0][part], sizes[1][part]) for part in sizes[0]}
        return cls(
            titles=(before.title(), after.title()),
            durations_s=(before.duration_s, after.duration_s),
            peaks=changes.pop("peaks"),
            **{part: tuple(c for c in found if c.change_bytes) for part, found in changes.items()},
        )

    def __repr__(self) -> str:
        return f"<RecordingDiff of {self.titles[0]!r} and {self.titles[1]!r}>"

    def _parts(self) -> list[Part]:
        heads = zip("AB", self.titles, self.durations_s, strict=True)
        lines = [f"{side}  {title}, {s:.1f} s" for side, title, s in heads]
        parts: list[Part] = [Paragraph("", "\n".join(lines))]
        for title, changes in (
            ("At most", self.peaks),
            ("Grew from step to step", self.growth),
            ("Categories at the end", self.categories),
            ("Tensors at the end", self.tensors),
            ("Lines at the peak", self.lines),
        ):
            rows = [
                (
                    each.name,
                    in_bytes(each.before_bytes),
                    in_bytes(each.after_bytes),
                    by_bytes(each.change_bytes),
                    each.created_at,
                )
                for each in changes
            ]
            if rows:
                parts.append(Table(title, _COLUMNS, rows, by=_CHANGE, most=MOST_ROWS))
        if not (self.growth or self.categories or self.tensors or self.lines):
            parts.append(Paragraph("", "Nothing else that both recorded differs."))
        return parts


def _sizes(run: Recording) -> dict[str, _Sizes]:
    """Return the bytes of each part of a difference."""

    def named(found: Mapping[str, int]) -> _Sizes:
        return {(name, "", ""): n_bytes for name, n_bytes in found.items()}

    rows = [row for track in run.over_time for row in track.at_peak]
    lines = summed(rows, lambda row: row.stack[-1] if row.stack else row.category or UNKNOWN)
    tensors = Counter[tuple[str, str, str]]()
    for tensor in () if run.memory is None else run.memory.rows:
        if tensor.counted_bytes:
            key = place_of(tensor.name), tensor.category, tensor.created_at or ""
            tensors[key] += tensor.counted_bytes
    grown = {each.name: each.grown_bytes for each in run.growth}
    return {
        "peaks": named(run.peaks),
        "categories": None if run.memory is None else named(run.memory.categories),
        "tensors": None if run.memory is None else tensors,
        "lines": named({line: n for line, (n, _) in lines.items()}) if run.over_time else None,
        "growth": named(grown) if run.seeks_leaks else None,
    }


def _changes(before: _Sizes, after: _Sizes) -> tuple[Change, ...]:
    # A part that only one of them recorded says nothing of the other. If a run ended with no tensor
    # alive, the tensors of the other run are new or gone.
    if before is None or after is None:
        return ()
    keys = before.keys() | after.keys()
    found = [Change(*key, before.get(key, 0), after.get(key, 0)) for key in keys]
    return tuple(sorted(found, key=lambda each: (-abs(each.change_bytes), each.name)))


@dataclass(frozen=True, slots=True, repr=False)
class RecordedRanks(Report):
    """Several recordings, side by side.

    Attributes:
        recordings: those of ranks in the order of the ranks.
    """

    recordings: tuple[Recording, ...]

    _is_spaced = True

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Self:
        """Put recordings in order."""
        return cls(tuple(sorted(recordings, key=lambda each: (each.rank is None, each.rank or 0))))

    @property
    def largest(self) -> Recording:
        """The one with the highest peak; of several, the first."""
        return max(self.recordings, key=lambda each: max(each.peaks.values(), default=0))

    def __repr__(self) -> str:
        return f"<RecordedRanks of {len(self.recordings)} recordings>"

    def _parts(self) -> list[Part]:
        rows = []
        for each in self.recordings:
            memory = [] if each.memory is None else each.memory.devices
            at_end = {device.device: device.total_bytes for device in memory}
            # runs that are no ranks differ by their commands
            name = each.title() if each.rank is None else str(each.rank)
            head = (name, each.ended, f"{each.duration_s:.1f}")
            for device in sorted(each.peaks.keys() | at_end.keys()) or [""]:
                figures = [found.get(device) for found in (each.peaks, at_end)]
                rows.append((*head, device, *("" if n is None else in_bytes(n) for n in figures)))
        are_ranks = any(each.rank is not None for each in self.recordings)
        columns = (Column("rank" if are_ranks else "run"), *_RANK_COLUMNS)
        # The others do the same, or the table says how they differ.
        title = f"{len(self.recordings)} recordings"
        return [Table(title, columns, rows), *self.largest._parts()]
