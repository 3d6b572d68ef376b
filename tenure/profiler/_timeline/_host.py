"""What the process takes of the host's memory, sampled from time to time between operations.

No thread runs for it: a sample is taken by the first operation after its time. Invariant: samples
are thinned as levels are, the highest of each interval is kept.
"""

from __future__ import annotations

import time

from tenure._host_memory import c_library_slack_bytes, python_arena_bytes, resident_bytes

from ._series import Series
from ._timeline_report import HostTimeline

_INTERVAL_NS = 50_000_000
# the arenas of a large heap take milliseconds to count: at most so much of the time
_SHARE = 200
_NS = 1e9


class HostSamples:
    """Samples of one process."""

    def __init__(self) -> None:
        self._series = Series(most=1024)
        self._parts: dict[int, tuple[int, int, int]] = {}
        self._number = 0

    def take(self, at_ns: int, tensors_bytes: int) -> int:
        """Take one; returns when the next is wanted.

        Args:
            at_ns: the time since the recording began.
            tensors_bytes: what torch's allocator has given out.
        """
        began_ns = time.perf_counter_ns()
        resident = resident_bytes()
        self._number += 1
        self._parts[self._number] = (
            tensors_bytes,
            python_arena_bytes() or 0,
            c_library_slack_bytes() or 0,
        )
        self._series.add(self._number, at_ns, resident)
        if len(self._parts) > 4 * len(self._series) + 16:
            self._parts = {number: self._parts[number] for number in self._series.moments}
        took_ns = time.perf_counter_ns() - began_ns
        return at_ns + max(_INTERVAL_NS, _SHARE * took_ns)

    def timeline(self) -> HostTimeline:
        """What they tell."""
        kept = list(zip(self._series.moments, self._series.levels, strict=True))
        rows = [(resident, *self._parts[number]) for number, resident in kept]
        return HostTimeline(
            tuple(at_ns / _NS for at_ns in self._series.times_ns),
            tuple(resident for resident, _, _, _ in rows),
            tuple(tensors for _, tensors, _, _ in rows),
            tuple(arenas for _, _, arenas, _ in rows),
            tuple(slack for _, _, _, slack in rows),
            tuple(max(0, resident - sum(parts)) for resident, *parts in rows),
        )

    @property
    def notes(self) -> list[str]:
        """What the system does not tell."""
        found = []
        if python_arena_bytes() is None:
            found.append("this Python does not tell its arenas: its objects count as the rest")
        if c_library_slack_bytes() is None:
            found.append("this C library does not tell what it holds unused: that is in the rest")
        return found
