"""Runs beside each other: two of a program, or the ranks of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from tenure._errors import ReportFormatError
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
from ._leaks_found import MOST_ROWS
from ._recording import Recording
from ._tree import UNKNOWN

_RANK_COLUMNS = (
    Column("rank"),
    Column("ended"),
    Column("seconds", ">", spare=1),
    Column("device"),
    Column("at most", ">"),
    Column("at the end", ">"),
)
ChangeKind = Literal["new", "gone", "grown", "shrunk", "same"]

_SIDES = ("A", "B")
_CHANGE = "change"
_FIGURES = (bytes_column("A"), bytes_column("B"), bytes_column(_CHANGE, signed))


@dataclass(frozen=True, slots=True)
class Change:
    """Something whose bytes differ between two runs.

    Attributes:
        kind: whether it is in one run alone, or takes more or less in the second, or as much.
        name: the tensor, category or line.
        category: what it is; empty for a category and for a line.
        created_at: where it was made, if that is known; else empty.
        before_bytes: its bytes in the first run.
        after_bytes: its bytes in the second run.
    """

    kind: ChangeKind
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

        def different(sizes_of: Callable[[Recording], _Sizes | None]) -> tuple[Change, ...]:
            changes = _changes(sizes_of(before), sizes_of(after))
            return tuple(each for each in changes if each.change_bytes)

        return cls(
            titles=(before.title(), after.title()),
            durations_s=(before.duration_s, after.duration_s),
            peaks=_changes(_by_name(before.peaks), _by_name(after.peaks)),
            categories=different(_by_category),
            tensors=different(_by_tensor),
            lines=different(_by_line),
            growth=different(_by_growth),
        )

    def __repr__(self) -> str:
        return f"<RecordingDiff of {self.titles[0]!r} and {self.titles[1]!r}>"

    def _parts(self) -> list[Part]:
        heads = zip(_SIDES, self.titles, self.durations_s, strict=True)
        lines = [f"{side}  {title}, {s:.1f} s" for side, title, s in heads]
        parts: list[Part] = [Paragraph("", "\n".join(lines))]
        for title, changes in (
            ("At most", self.peaks),
            ("Grew from step to step", self.growth),
            ("Categories at the end", self.categories),
            ("Tensors at the end", self.tensors),
            ("Lines at the peak", self.lines),
        ):
            if changes:
                parts.append(_table(title, changes))
        if not (self.growth or self.categories or self.tensors or self.lines):
            parts.append(Paragraph("", "Nothing else that both recorded differs."))
        return parts


# Name, category and site. None of what a run has not recorded.
_Key = tuple[str, str, str]
_Sizes = Mapping[_Key, int]


def _by_name(found: Mapping[str, int]) -> _Sizes:
    return {(name, "", ""): n_bytes for name, n_bytes in found.items()}


def _by_category(run: Recording) -> _Sizes | None:
    return None if run.memory is None else _by_name(run.memory.categories)


def _by_growth(run: Recording) -> _Sizes | None:
    grown = {each.name: each.grown_bytes for each in run.growth if each.last_step}
    return _by_name(grown) if run.seeks_leaks else None


def _by_tensor(run: Recording) -> _Sizes | None:
    if run.memory is None:
        return None
    found: defaultdict[_Key, int] = defaultdict(int)
    for row in run.memory.rows:
        if row.counted_bytes:
            key = place_of(row.name), row.category, row.created_at or ""
            found[key] += row.counted_bytes
    return found


def _by_line(run: Recording) -> _Sizes | None:
    if not run.over_time:
        return None
    rows = [row for track in run.over_time for row in track.at_peak]
    found = summed(rows, lambda row: row.stack[-1] if row.stack else row.category or UNKNOWN)
    return _by_name({name: n_bytes for name, (n_bytes, _) in found.items()})


def _changes(before: _Sizes | None, after: _Sizes | None) -> tuple[Change, ...]:
    # What only one of them recorded tells nothing of the other; of a run that ended with no tensor
    # alive, what the other has is new or gone.
    if before is None or after is None:
        return ()
    found = []
    for key in before.keys() | after.keys():
        a, b = before.get(key, 0), after.get(key, 0)
        found.append(Change(_kind(a, b), *key, a, b))
    return tuple(sorted(found, key=lambda each: (-abs(each.change_bytes), each.name)))


def _kind(before_bytes: int, after_bytes: int) -> ChangeKind:
    if before_bytes == after_bytes:
        return "same"
    if not before_bytes:
        return "new"
    if not after_bytes:
        return "gone"
    return "grown" if after_bytes > before_bytes else "shrunk"


def _figures(change: Change) -> tuple[str, str, str]:
    moved = by_bytes(change.change_bytes)
    return in_bytes(change.before_bytes), in_bytes(change.after_bytes), moved


def _table(title: str, changes: tuple[Change, ...]) -> Table:
    columns = (Column("name"), *_FIGURES, Column("created at", spare=1), Column("in", spare=2))
    rows = [(each.name, *_figures(each), each.created_at, each.kind) for each in changes]
    return Table(title, columns, rows, by=_CHANGE, most=MOST_ROWS)


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
        rows = [row for i, each in enumerate(self.recordings) for row in _rows(i, each)]
        are_ranks = any(each.rank is not None for each in self.recordings)
        columns = (_RANK_COLUMNS[0] if are_ranks else Column("run"), *_RANK_COLUMNS[1:])
        ranks: list[Part] = [Table(f"{len(self.recordings)} recordings", columns, rows)]
        if not are_ranks:
            names = (f"{i}  {each.title()}" for i, each in enumerate(self.recordings))
            ranks.insert(0, Paragraph("", "\n".join(names)))
        # The others do the same, or the table says how they differ.
        return [*ranks, *self.largest._parts()]

    def _facts(self) -> dict[str, Any]:
        return {"recordings": [each.to_dict() for each in self.recordings]}

    @classmethod
    def _of_facts(cls, facts: Mapping[str, object]) -> Self:
        found = facts.get("recordings")
        if not isinstance(found, list):
            raise ReportFormatError(f"{cls.__name__}.recordings is missing. Write it anew.")
        return cls(tuple(map(Recording.from_dict, found)))


def _rows(index: int, recording: Recording) -> list[tuple[str, ...]]:
    at_end = {}
    if recording.memory is not None:
        at_end = {device.device: device.total_bytes for device in recording.memory.devices}
    name = str(index if recording.rank is None else recording.rank)
    head = (name, recording.ended, f"{recording.duration_s:.1f}")
    devices = sorted(recording.peaks.keys() | at_end.keys()) or [""]
    return [
        (
            *(head if i == 0 else ("", "", "")),
            device,
            in_bytes(recording.peaks[device]) if device in recording.peaks else "",
            in_bytes(at_end[device]) if device in at_end else "",
        )
        for i, device in enumerate(devices)
    ]
