"""From moments and lives to a report: who had the bytes at each kept moment.

Invariant: every division of a level adds up to it. What the allocator has in use and no storage
shows is a part of its own; if storages show more than the allocator has, the largest parts are cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate

from ._account import ORDER, UNEXPLAINED, Account
from ._places import Places
from ._series import Life
from ._timeline_report import DeviceTimeline, PeakRow

_MOST_LINES = 20
_MOST_SCOPES = 50
_MOST_ROWS = 500
OTHER = "other"
_NS = 1e9
_Span = tuple[int, int, int]
"""The index of the first moment that a storage counts in, of the first after it, and its bytes."""
_Divided = dict[str, tuple[int, ...]]


def compose(account: Account, places: Places) -> tuple[DeviceTimeline, int]:
    """Return a device's timeline, and by how much its storages showed more than its level."""
    series, lives = account.series, account.series.lives
    levels = [moment.n_bytes for moment in series.moments]
    times_s = tuple(moment.at_ns / _NS for moment in series.moments)
    peak = levels.index(max(levels))
    spans = [(series.index(life.begin), series.index(life.end), life.n_bytes) for life in lives]
    line_of = cache(lambda place: places.stack(place)[-1])
    categories = [life.category for life in lives]
    scopes = [life.scope for life in lives]
    lines = [line_of(life.place) for life in lives]
    by_category, excess = _divided(categories, spans, levels, peak, None)
    order = dict.fromkeys((*ORDER, *by_category))
    timeline = DeviceTimeline(
        device=str(account.device),
        times_s=times_s,
        live_bytes=tuple(levels),
        began_bytes=account.began_bytes,
        peak_bytes=levels[peak],
        peak_at_s=times_s[peak],
        by_category={name: by_category[name] for name in order if name in by_category},
        by_scope=_divided(scopes, spans, levels, peak, _MOST_SCOPES)[0],
        by_line=_divided(lines, spans, levels, peak, _MOST_LINES)[0],
        at_peak=_rows_at(
            [life for life, span in zip(lives, spans, strict=True) if span[0] <= peak < span[1]],
            levels[peak],
            places,
        ),
    )
    return timeline, excess


def _divided(
    names: Sequence[str], spans: Sequence[_Span], levels: list[int], peak: int, most: int | None
) -> tuple[_Divided, int]:
    """Return series by name, and the most by which all were more than a level and were cut."""
    weights: Counter[str] = Counter()
    for name, (begin, end, n_bytes) in zip(names, spans, strict=True):
        # what weighs at the peak first, then what has weighed most in all
        weights[name] += n_bytes * (end - begin + ((begin <= peak < end) << 32))
    shown = {name for name, _ in weights.most_common(most)}
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (len(levels) + 1))
    for name, (begin, end, n_bytes) in zip(names, spans, strict=True):
        each = changes[name if name in shown else OTHER]
        each[begin] += n_bytes
        each[end] -= n_bytes
    series = {name: list(accumulate(each))[:-1] for name, each in changes.items()}
    rest = [level - sum(each[i] for each in series.values()) for i, level in enumerate(levels)]
    for i, n_bytes in enumerate(rest):
        _cut(series.values(), i, -n_bytes)
    series[UNEXPLAINED] = [max(0, n_bytes) for n_bytes in rest]
    found = {name: tuple(each) for name, each in series.items() if any(each)}
    return found or {UNEXPLAINED: tuple(levels)}, -min(0, *rest)


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
