"""Two runs beside each other: what is new, what is gone, what takes more than before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
from ._leaks_found import MOST_ROWS
from ._recording import Recording
from ._tree import UNKNOWN

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
        growths = [_by_growth(run) for run in (before, after)]
        both_sought = before.seeks_leaks and after.seeks_leaks
        grown = _all_changes(*growths) if both_sought else ()
        return cls(
            (before.title(), after.title()),
            (before.duration_s, after.duration_s),
            _all_changes(_by_name(before.peaks), _by_name(after.peaks)),
            _changes(_by_category(before), _by_category(after)),
            _changes(_by_tensor(before), _by_tensor(after)),
            _changes(_by_line(before), _by_line(after)),
            tuple(each for each in grown if each.change_bytes),
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


_Key = tuple[str, str, str]


def _by_name(found: Mapping[str, int]) -> dict[_Key, int]:
    return {(name, "", ""): n_bytes for name, n_bytes in found.items()}


def _by_category(run: Recording) -> dict[_Key, int] | None:
    return None if run.memory is None else _by_name(run.memory.categories)


def _by_growth(run: Recording) -> dict[_Key, int]:
    return _by_name({each.name: each.grown_bytes for each in run.growth if each.last_step})


def _by_tensor(run: Recording) -> dict[_Key, int] | None:
    if run.memory is None:
        return None
    found: defaultdict[_Key, int] = defaultdict(int)
    for row in run.memory.rows:
        if row.counted_bytes:
            key = place_of(row.name), row.category, row.created_at or ""
            found[key] += row.counted_bytes
    return found


def _by_line(run: Recording) -> dict[_Key, int] | None:
    if not run.over_time:
        return None
    found: defaultdict[_Key, int] = defaultdict(int)
    for track in run.over_time:
        for block in track.at_peak:
            name = block.stack[-1] if block.stack else block.category or UNKNOWN
            found[name, "", ""] += block.n_bytes
    return found


def _changes(
    before: Mapping[_Key, int] | None, after: Mapping[_Key, int] | None
) -> tuple[Change, ...]:
    # What only one of them recorded tells nothing of the other; of a run that ended with no tensor
    # alive, what the other has is new or gone.
    if before is None or after is None:
        return ()
    return tuple(each for each in _all_changes(before, after) if each.change_bytes)


def _all_changes(before: Mapping[_Key, int], after: Mapping[_Key, int]) -> tuple[Change, ...]:
    found = [
        Change(_kind(key, before, after), *key, before.get(key, 0), after.get(key, 0))
        for key in before.keys() | after.keys()
    ]
    return tuple(sorted(found, key=lambda each: (-abs(each.change_bytes), each.name)))


def _kind(key: _Key, before: Mapping[_Key, int], after: Mapping[_Key, int]) -> ChangeKind:
    if not before.get(key):
        return "new"
    if not after.get(key):
        return "gone"
    if after[key] == before[key]:
        return "same"
    return "grown" if after[key] > before[key] else "shrunk"


def _figures(change: Change) -> tuple[str, str, str]:
    moved = by_bytes(change.change_bytes)
    return in_bytes(change.before_bytes), in_bytes(change.after_bytes), moved


def _table(title: str, changes: tuple[Change, ...]) -> Table:
    columns = (Column("name"), *_FIGURES, Column("created at", spare=1), Column("in", spare=2))
    rows = [(each.name, *_figures(each), each.created_at, each.kind) for each in changes]
    return Table(title, columns, rows, by=_CHANGE, most=MOST_ROWS)
