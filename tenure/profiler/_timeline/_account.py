"""The account of one device: its level over time, and the storages that are alive on it.

Invariants: an entry is a weak reference, and goes with its storage; no counter is reset, so the
highest level between two readings is known as long as the counter of the peak rises. Every division
of a level adds up to it: what the allocator has in use and no storage shows is a part of its own,
and if storages show more than the allocator has, the largest parts are cut.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import UntypedStorage

from tenure._cuda_blocks import BLOCK_BYTES, up_to
from tenure._stream import Allocated, allocated_on

from .._owners import CATEGORIES, GRADIENTS, OTHERS, SAVED
from ._places import Places
from ._series import FOREVER, Life, Series
from ._timeline_report import DeviceTimeline, PeakRow

# Counters take long to read: a fiftieth of the time, unless there may be a new peak.
_SHARE = 50
INPUTS = "inputs"
IN_BACKWARD = "temporary in backward"
UNEXPLAINED = "temporary or unexplained"
"""The bytes that the allocator has in use and no tensor shows: made and freed within an operation,
or in code that no mode sees."""
_ORDER = (*CATEGORIES[:-1], INPUTS, IN_BACKWARD, OTHERS)
"""The categories of storages in the order in which they are shown."""
_MOST_LINES = 20
_MOST_SCOPES = 50
_MOST_ROWS = 500
OTHER = "other"
_NS = 1e9
_Span = tuple[int, int, Life]
"""The index of the first moment that a storage counts in, of the first after it, and its life."""


class TimedStorage(weakref.ref[UntypedStorage]):
    """A storage of which notes are taken.

    Attributes:
        key: its address in C++, unique while it lives.
        account: the account of its device.
        n_bytes: the bytes that it takes, as the allocator rounds them.
        place: where it was made.
        scope: the name of the scope that it was made in.
        category: what it counts as, as far as is known while it lives.
        begin: the first moment that it counts in.
        went_in_backward: whether it has gone while a backward pass ran.
        stays: whether it counts on though it has gone.
    """

    __slots__ = (
        "account", "begin", "category", "key", "n_bytes", "place", "scope", "stays",
        "went_in_backward",
    )  # fmt: skip

    key: int
    account: TimelineAccount
    n_bytes: int
    place: int
    scope: str
    category: str
    begin: int
    went_in_backward: bool
    stays: bool


class TimelineAccount:
    """One device, from now on.

    Args:
        device: the device, with its index.

    Attributes:
        series: the moments that are kept, and the storages that were alive at them.
        began_bytes: what was in use when the recording began.
        known_bytes: of the storages that are known and alive.
        stayed_bytes: of those that count on though they have gone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.series = Series()
        self.began_bytes = self.known_bytes = self.stayed_bytes = 0
        self._counted = None if device.type == "cpu" else _counters_or_none(device)
        self._earlier_peak_bytes = 0 if self._counted is None else self._counted.peak
        self._highest_bytes = 0 if self._counted is None else self._counted.current
        self._known_then_bytes = 0
        self._next_ns = 0

    def begin(self) -> None:
        """Begin, with all live storages known."""
        self.began_bytes = self._known_then_bytes = self.known_bytes

    def taken_by(self, n_bytes: int) -> int:
        """Return what a storage takes."""
        return up_to(n_bytes, BLOCK_BYTES) if self.device.type == "cuda" else n_bytes

    def look(self, number: int, at_ns: int, *, is_last: bool = False) -> None:
        """Note the most in use since the last look, as far as it is known; not of the host."""
        if self.device.type == "cpu":
            return
        counted, level_bytes = self._counted, self.known_bytes
        if counted is not None:
            level_bytes += counted.current - self._known_then_bytes
            is_higher = level_bytes > self._highest_bytes
            if is_last or is_higher or time.perf_counter_ns() >= self._next_ns:
                level_bytes = self._read(counted.peak)
        self.series.add(number, at_ns, level_bytes + self.stayed_bytes)

    def _read(self, before_bytes: int) -> int:
        began_ns = time.perf_counter_ns()
        counted = self._counted = allocated_on(self.device)
        ended_ns = time.perf_counter_ns()
        self._next_ns = ended_ns + _SHARE * (ended_ns - began_ns)
        self._known_then_bytes = self.known_bytes
        high_bytes = counted.peak if counted.peak > before_bytes else counted.current
        self._highest_bytes = max(self._highest_bytes, high_bytes)
        return high_bytes

    def tell(self, entry: TimedStorage, end: int) -> None:
        """Put the life of a storage down; with no end it is alive when the recording ends."""
        # All moments before its end are there: most are gone before one of them is kept.
        moments, category = self.series.moments, entry.category
        if end != FOREVER and (
            entry.begin >= end or not moments or moments[-1].number < entry.begin
        ):
            return
        # by how it has gone, unless a census said more
        if category == IN_BACKWARD and not entry.went_in_backward:
            category = GRADIENTS
        elif category == OTHERS and entry.went_in_backward:
            category = SAVED
        life = Life(entry.begin, end, entry.n_bytes, entry.place, entry.scope, category)
        self.series.add_life(life)

    def notes(self) -> list[str]:
        """Return what could not be seen."""
        if self._counted is None and self.device.type != "cpu":
            return [f"{self.device} does not count: its level is what tensors show"]
        highest = max((each.n_bytes for each in self.series.moments), default=0)
        if self._earlier_peak_bytes <= highest:
            return []
        return [
            f"{self.device} has counted a higher peak before: temporaries inside operations were "
            "not seen; reset_peak_memory_stats() before the block lets them be seen"
        ]


def _counters_or_none(device: torch.device) -> Allocated | None:
    # a backend whose allocator counts nothing
    try:
        return allocated_on(device)
    except (AttributeError, RuntimeError):
        return None


# --- who had the bytes at each kept moment


def compose(account: TimelineAccount, places: Places) -> DeviceTimeline:
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
    order = dict.fromkeys((*_ORDER, *by_category))
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
