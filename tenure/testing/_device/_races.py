"""The race detector: which accesses to the same bytes nothing orders.

Each launch on a stream is one tick of that stream. A stream's vector clock holds, for every stream,
the last tick that is sure to have run before the next launch; waits merge clocks. Two accesses
to overlapping bytes, at least one of them a write, must be ordered by those clocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tenure._errors import RaceError

VectorClock = dict[int, int]

_ADVICE = "Make the later stream wait for an event recorded after the earlier work."
_FREE_ADVICE = "Call record_stream(), or make the home stream wait before the tensor is let go."


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes `[low, high)` of a block, touched by the operator `by`, tick `tick` of its stream."""

    low: int
    high: int
    stream_id: int
    tick: int
    is_write: bool
    by: str

    def overlaps(self, other: "Access") -> bool:
        """Return whether both touch some byte."""
        return self.low < other.high and other.low < self.high

    def covers(self, other: "Access") -> bool:
        """Return whether every byte of `other` is touched by this one."""
        return self.low <= other.low and other.high <= self.high


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `[low, high)` of one block's accesses; what a launch reads or writes."""

    history: "History"
    low: int
    high: int


@dataclass(slots=True)
class History:
    """The accesses to one block that can still conflict, its home stream and recorded streams."""

    home_stream_id: int
    accesses: list[Access] = field(default_factory=list)
    recorded_stream_ids: set[int] = field(default_factory=set)


def default_number(index: int) -> int:
    """Return the number of a default stream: 0, and below -1 for each device after the first."""
    return 0 if index == 0 else -1 - index


def stream_name(number: int) -> str:
    """Return a stream as the messages name it."""
    return f"stream {number}" if number >= 0 else f"the default stream of device {-1 - number}"


def merge_clocks(into: VectorClock, other: VectorClock) -> None:
    """Raise each entry of `into` to that of `other`."""
    for stream_id, tick in other.items():
        into[stream_id] = max(into.get(stream_id, 0), tick)


class RaceDetector:
    """Keeps the faults found so far in `faults`; a conflicting launch also raises RaceError."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.faults: list[str] = []

    def launch(
        self,
        by: str,
        stream_id: int,
        seen: VectorClock,
        reads: Iterable[Span],
        writes: Iterable[Span],
    ) -> None:
        """Count one launch of the operator `by` on the stream and check what it touches.

        Raises:
            RaceError: a byte was touched on another stream, and no wait orders the two.
        """
        tick = seen[stream_id] = seen.get(stream_id, 0) + 1
        if not self.enabled:
            return
        for span in reads:
            self._touch(span, Access(span.low, span.high, stream_id, tick, False, by), seen)
        for span in writes:
            self._touch(span, Access(span.low, span.high, stream_id, tick, True, by), seen)

    def free(self, history: History, name: str, seen: VectorClock) -> None:
        """Check a block that is let go, against the clocks of its home stream and of the host."""
        if not self.enabled:
            return
        safe = {history.home_stream_id, *history.recorded_stream_ids}
        for access in history.accesses:
            if access.stream_id not in safe and seen.get(access.stream_id, 0) < access.tick:
                self.faults.append(
                    f"freed while in use: {name} of {stream_name(history.home_stream_id)} was freed"
                    f" while {stream_name(access.stream_id)} may still use it ({access.by})."
                    f" {_FREE_ADVICE}"
                )
                return

    def _touch(self, span: Span, new: Access, seen: VectorClock) -> None:
        kept = []
        for old in span.history.accesses:
            self._check(old, new, seen)
            if not _replaces(new, old):
                kept.append(old)
        span.history.accesses = [*kept, new]

    def _check(self, old: Access, new: Access, seen: VectorClock) -> None:
        if not (old.is_write or new.is_write) or not old.overlaps(new):
            return
        if seen.get(old.stream_id, 0) < old.tick:
            self.report(_conflict(old, new))

    def report(self, fault: str) -> None:
        """Keep a fault and raise it."""
        self.faults.append(fault)
        raise RaceError(fault)


def _replaces(new: Access, old: Access) -> bool:
    """Return whether an order after `new` implies one after `old`, so that `old` can go."""
    if new.is_write:
        return new.covers(old)
    return not old.is_write and old.stream_id == new.stream_id and new.covers(old)


def _conflict(old: Access, new: Access) -> str:
    kind = "RAW" if not new.is_write else "WAW" if old.is_write else "WAR"
    verbs = {True: "writes", False: "reads"}
    low, high = max(old.low, new.low), min(old.high, new.high)
    later, earlier = stream_name(new.stream_id), stream_name(old.stream_id)
    return (
        f"{kind}: {later} {verbs[new.is_write]} bytes {low} to {high} of a tensor"
        f" that {earlier} {verbs[old.is_write]}, and no wait orders the two"
        f" ({new.by} after {old.by}). {_ADVICE}"
    )
