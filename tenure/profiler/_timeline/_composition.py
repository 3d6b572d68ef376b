"""From moments and lives to what a report shows: whose the bytes were at each kept moment.

Invariant: every division of a level adds up to it. What the allocator has in use and no storage
shows is a part of its own; where storages show more than the allocator has, the largest parts are
cut, and it is told by how much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from ._accounts import Account
from ._bands import Bands
from ._categories import NAMES, UNEXPLAINED
from ._lives import Life
from ._places import Places
from ._timeline_report import DeviceTimeline, PeakRow

_MOST_LINES = 20
_MOST_SCOPES = 50
_MOST_ROWS = 500
OTHER = "other"
_NS = 1e9


class Composed(NamedTuple):
    """A device's timeline, and by how much at most its storages showed more than was in use."""

    timeline: DeviceTimeline
    excess_bytes: int


def compose(account: Account, places: Places, bands: Bands) -> Composed:
    """What a report shows of one device."""
    series, lives = account.series, list(account.lives)
    levels = list(series.levels)
    peak = series.highest()
    lines = _Lines(places)
    spans = [_span(life, series.moments) for life in lives]
    whole = [0] * len(levels)
    for life, (begin, end) in zip(lives, spans, strict=True):
        _add(whole, begin, end, life.n_bytes)
    excess = max(
        0, *(known - level for known, level in zip(accumulate(whole), levels, strict=True))
    )

    def divided(key: Callable[[Life], str], most: int | None) -> dict[str, tuple[int, ...]]:
        return _divided(lives, spans, key, levels, peak, most)

    by_category = divided(lambda life: NAMES[life.category], None)
    order = [name for name in (*NAMES, UNEXPLAINED) if name in by_category]
    times_s = tuple(at_ns / _NS for at_ns in series.times_ns)
    timeline = DeviceTimeline(
        str(account.device),
        times_s,
        tuple(levels),
        account.began_bytes,
        levels[peak],
        times_s[peak],
        {name: by_category[name] for name in order},
        divided(lambda life: bands.names[life.scope], _MOST_SCOPES),
        divided(lambda life: lines.of(life.place), _MOST_LINES),
        _rows_at(peak, lives, spans, levels[peak], places, bands),
    )
    return Composed(timeline, excess)


class _Lines:
    """The spelled line of each place, once."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._spelled: dict[int, str] = {}

    def of(self, place: int) -> str:
        found = self._spelled.get(place)
        if found is None:
            found = self._spelled[place] = self._places.line(place)
        return found


def _span(life: Life, moments: Sequence[int]) -> tuple[int, int]:
    """The first kept moment that it counts in, and the first after it."""
    return bisect_left(moments, life.begin), bisect_left(moments, life.end)


def _add(changes: list[int], begin: int, end: int, n_bytes: int) -> None:
    if begin < end:
        changes[begin] += n_bytes
        if end < len(changes):
            changes[end] -= n_bytes


def _divided(
    lives: list[Life],
    spans: list[tuple[int, int]],
    key: Callable[[Life], str],
    levels: list[int],
    peak: int,
    most: int | None,
) -> dict[str, tuple[int, ...]]:
    """Series by a key of each life, and what is left of the levels."""
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * len(levels))
    for name, members in _grouped(lives, spans, key, peak, most).items():
        for n_bytes, begin, end in members:
            _add(changes[name], begin, end, n_bytes)
    series = {name: list(accumulate(each)) for name, each in changes.items()}
    series = {name: each for name, each in series.items() if any(each)}
    rest = [0] * len(levels)
    for i, level in enumerate(levels):
        rest[i] = level - sum(each[i] for each in series.values())
        if rest[i] < 0:
            _cut(series, i, -rest[i])
            rest[i] = 0
    if any(rest) or not series:
        series[UNEXPLAINED] = rest
    return {name: tuple(each) for name, each in series.items()}


def _grouped(
    lives: list[Life],
    spans: list[tuple[int, int]],
    key: Callable[[Life], str],
    peak: int,
    most: int | None,
) -> dict[str, list[tuple[int, int, int]]]:
    members: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    # what weighs at the peak first, then what has weighed most in all
    weight: Counter[str] = Counter()
    for life, (begin, end) in zip(lives, spans, strict=True):
        name = key(life)
        members[name].append((life.n_bytes, begin, end))
        weight[name] += life.n_bytes * (end - begin) + (
            (1 << 62) + (life.n_bytes << 32) if begin <= peak < end else 0
        )
    if most is None or len(members) <= most:
        return members
    shown = {name for name, _ in weight.most_common(most)}
    found = {name: each for name, each in members.items() if name in shown}
    found[OTHER] = [each for name in members if name not in shown for each in members[name]]
    return found


def _cut(series: dict[str, list[int]], i: int, n_bytes: int) -> None:
    """Take what is too much off the largest parts."""
    for each in sorted(series.values(), key=lambda each: -each[i]):
        taken = min(each[i], n_bytes)
        each[i] -= taken
        n_bytes -= taken


def _rows_at(
    peak: int,
    lives: list[Life],
    spans: list[tuple[int, int]],
    level: int,
    places: Places,
    bands: Bands,
) -> tuple[PeakRow, ...]:
    found: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0])
    for life, (begin, end) in zip(lives, spans, strict=True):
        if begin <= peak < end:
            row = found[life.category, life.scope, life.place]
            row[0] += life.n_bytes
            row[1] += 1
    rows = [
        PeakRow(NAMES[category], bands.names[scope], places.stack(place), n_bytes, n)
        for (category, scope, place), (n_bytes, n) in found.items()
    ]
    known = sum(row.n_bytes for row in rows)
    if level > known:
        rows.append(PeakRow(UNEXPLAINED, "", (), level - known, 0))
    rows.sort(key=lambda row: -row.n_bytes)
    # as `_cut` does it
    excess = known - level
    for i, each in enumerate(rows):
        taken = min(each.n_bytes, max(0, excess))
        rows[i] = replace(each, n_bytes=each.n_bytes - taken)
        excess -= taken
    rest = rows[_MOST_ROWS:]
    if rest:
        n_bytes, n = sum(row.n_bytes for row in rest), sum(row.n_storages for row in rest)
        rows[_MOST_ROWS:] = [PeakRow(OTHER, "", (), n_bytes, n)]
    return tuple(rows)
