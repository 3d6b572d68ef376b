"""What one line did, over all its hits: sums, and of each field of the device's the largest value.

torch makes the hundred flat names of ``memory_stats()`` anew at each call, and sorts them; the
nested form that it makes them of is public too, where a backend has it. Names are made here of what
a line has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ._meters import Interval, Stats, Usage


@dataclass(slots=True)
class Figures:
    """What one line did, over all its hits.

    Attributes:
        hits: how often it was begun.
        usage: the sum of what was booked to it; None as long as nothing was.
        statistics: of each field of the device's the largest value.
    """

    hits: int = 0
    usage: Usage | None = None
    statistics: dict[str, int] = field(default_factory=dict)
    _last: Stats = field(default_factory=dict, compare=False)

    def add(self, usage: Usage) -> None:
        """Take an interval in."""
        known = self.usage
        self.usage = usage if known is None else known + usage

    def reach(self, peak_bytes: int, exact: bool) -> None:
        """Take a peak in, and nothing that was allocated or freed."""
        known = self.usage
        # Most lines are at a level that they have been at: nothing to add then.
        if known is None or peak_bytes > known.peak_bytes or not exact:
            self.add(Usage(0, 0, peak_bytes, True, exact))

    def note_statistics(self, interval: Interval) -> None:
        """Keep what the fields of the device reached in an interval."""
        _keep_largest(self.statistics, self._last, interval.before, interval.after)
        self._last = interval.after

    def merge(self, other: Figures) -> None:
        """Take in what the same line did on another thread."""
        self.hits += other.hits
        if other.usage is not None:
            self.add(other.usage)
        for name, value in other.statistics.items():
            self.statistics[name] = max(value, self.statistics.get(name, value))


def _keep_largest(largest: dict[str, int], last: Stats, before: Stats, after: Stats) -> None:
    """Take an interval into the largest value of each field.

    Args:
        largest: the values so far, by name.
        last: what this was called with as ``after`` the last time; empty at the first.
        before: the fields at the start of the interval.
        after: the fields at its end.
    """
    # Most lines leave the device alone, and a hundred names need not be made to learn that.
    if after == last and after == before:
        return
    new = {
        name: figures
        for name, figures in after.items()
        if name not in last or figures != last[name] or figures != before.get(name)
    }
    # A flat peak needs the current value, which may be as it was
    start, end = (before, new) if "allocated_bytes" in after else (before, after)
    was = dict(_flat("", {name: start[name] for name in end if name in start}))
    fields = dict(_flat("", end))
    for name in fields:
        value = _at_most(was, fields, name)
        largest[name] = max(value, largest.get(name, value))


def _flat(prefix: str, stats: Stats) -> Iterator[tuple[str, int]]:
    """The fields by the names that ``memory_stats()`` gives them."""
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _at_most(before: Mapping[str, int], after: Mapping[str, int], name: str) -> int:
    stem, _, figure = name.rpartition(".")
    if figure != "peak" or after[name] > before.get(name, 0):
        return after[name]
    current = f"{stem}.current"
    return max(before.get(current, 0), after.get(current, 0))
