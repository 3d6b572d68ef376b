"""From moments and lives to a report: who had the bytes at each kept moment.

Invariant: every division of a level adds up to it. What the allocator has in use and no storage
shows is a part of its own; if storages show more than the allocator has, the largest parts are cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from typing import Any

from ._account import ORDER, UNEXPLAINED, Account
from ._places import Places
from ._series import Life
from ._timeline_report import DeviceTimeline, PeakRow

_MOST_LINES = 20
_MOST_SCOPES = 50
_MOST_ROWS = 500
OTHER = "other"
_NS = 1e9
_Span = tuple[int, int, Life]
"""The index of the first moment that a storage counts in, of the first after it, and its life."""


def compose(account: Account, places: Places) -> DeviceTimeline:
    """Return a device's timeline."""
    series = account.series
    levels = [moment.n_bytes for moment in series.moments]
    times_s = tuple(moment.at_ns / _NS for moment in series.moments)
    peak = levels.index(max(levels))
    spans = [(series.index(life.begin), series.index(life.end), life) for life in series.lives]
    line_of = cache(lambda place: places.stack(place)[-1])

    def divided(name_of: Callable[[Life], str], most: int | None = None) -> dict[str, Any]:
        return _divided([(name_of(span[2]), span) for span in spans], levels, peak, most)

    by_category = divided(lambda life: life.category)
    order = dict.fromkeys((*ORDER, *by_category))
    return DeviceTimeline(
        device=str(account.device),
        times_s=times_s,
        live_bytes=tuple(levels),
        began_bytes=account.began_bytes,
        peak_bytes=levels[peak],
        peak_at_s=times_s[peak],
        by_category={name: by_category[name] for name in order if name in by_category},
        by_scope=divided(lambda life: life.scope, _MOST_SCOPES),
        by_line=divided(lambda life: line_of(life.place), _MOST_LINES),
        at_peak=_rows_at(
            [life for begin, end, life in spans if begin <= peak < end], levels[peak], places
        ),
    )


def _divided(
    named: list[tuple[str, _Span]], levels: list[int], peak: int, most: int | None
) -> dict[str, tuple[int, ...]]:
    """Return series by name, which add up to the levels."""
    weights: Counter[str] = Counter()
    for name, (begin, end, life) in named:
        # what weighs at the peak first, then what has weighed most in all
        weights[name] += life.n_bytes * (end - begin + ((begin <= peak < end) << 32))
    shown = {name for name, _ in weights.most_common(most)}
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (len(levels) + 1))
    for name, (begin, end, life) in named:
        each = changes[name if name in shown else OTHER]
        each[begin] += life.n_bytes
        each[end] -= life.n_bytes
    series = {name: list(accumulate(each))[:-1] for name, each in changes.items()}
    rest = [level - sum(each[i] for each in series.values()) for i, level in enumerate(levels)]
    for i, n_bytes in enumerate(rest):
        _cut(series.values(), i, -n_bytes)
    series[UNEXPLAINED] = [max(0, n_bytes) for n_bytes in rest]
    found = {name: tuple(each) for name, each in series.items() if any(each)}
    return found or {UNEXPLAINED: tuple(levels)}


def _cut(parts: Iterable[list[int]], i: int, n_bytes: int) -> None:
    """Take what is too much off the largest parts."""
    if n_bytes > 0:
        for each in sorted(parts, key=lambda each: -each[i]):
            taken = min(each[i], n_bytes)
            each[i] -= taken
            n_bytes -= taken


def _rows_at(lives: Iterable[Life], level: int, places: Places) -> tuple[PeakRow, ...]:
    """Return rows of the storages that are alive at the peak, which add up to its level."""
    found: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])
    for life in lives:
        figures = found[life.category, life.scope, life.place]
        figures[0] += life.n_bytes
        figures[1] += 1
    rest = level - sum(n_bytes for n_bytes, _ in found.values())
    _cut(found.values(), 0, -rest)
    rows = [
        PeakRow(category, scope, places.stack(place), *figures)
        for (category, scope, place), figures in found.items()
    ]
    if rest > 0:
        rows.append(PeakRow(UNEXPLAINED, "", (), rest, 0))
    rows.sort(key=lambda row: -row.n_bytes)
    if more := rows[_MOST_ROWS:]:
        n_bytes, n = sum(row.n_bytes for row in more), sum(row.n_storages for row in more)
        rows[_MOST_ROWS:] = [PeakRow(OTHER, "", (), n_bytes, n)]
    return tuple(rows)
