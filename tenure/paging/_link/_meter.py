"""Count what passes move and wait for. It stops nobody: only a report reads the events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Span = tuple[Any, Any]
"""The timed events before something and after it."""


@dataclass(slots=True)
class PassRecord:
    """One pass, in events.

    Attributes:
        span: its first and its last event on the stream that computes.
        stalls: the waits of that stream for copies.
        copies: the copies to the device since the pass before ended.
        copied_bytes: what they moved.
        faults: how many units were fetched only when they were used.
    """

    span: Span | None = None
    stalls: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    copied_bytes: int = 0
    faults: int = 0

    @property
    def whole_s(self) -> float:
        """How long it took on the device; its events must have happened, here and below."""
        return seconds([] if self.span is None else [self.span])

    @property
    def stall_s(self) -> float:
        """How much of it computation waited for copies."""
        return min(self.whole_s, seconds(self.stalls))

    @property
    def compute_s(self) -> float:
        """The rest."""
        return self.whole_s - self.stall_s

    @property
    def copy_s(self) -> float:
        """How long the copies took."""
        return seconds(self.copies)

    @property
    def link_bytes_per_s(self) -> float:
        """How fast they ran; 0 where there was none."""
        copy_s = self.copy_s
        return self.copied_bytes / copy_s if copy_s else 0.0

    def ends(self) -> list[Any]:
        """Return the events that it all ends with."""
        spans = [*([] if self.span is None else [self.span]), *self.copies, *self.stalls]
        return [end for _, end in spans]


class PassMeter:
    """Is told what goes over a link, and keeps it pass by pass.

    Attributes:
        last: the last pass that ended; None before the first.
        passes: how many have ended.
        total_faults: of all passes that ended.
    """

    def __init__(self) -> None:
        # Opened where the pass before it ends: what is fetched for a pass before it begins is its.
        self._now = PassRecord()
        self._began: Any = None
        self.last: PassRecord | None = None
        self.passes = 0
        self.total_faults = 0

    def begin(self, event: Any) -> None:
        """Begin a pass with this event."""
        self._began = event

    def end(self, event: Any) -> None:
        """End the pass with this event."""
        self._now.span = self._began, event
        self.total_faults += self._now.faults
        self.passes += 1
        self.last, self._now = self._now, PassRecord()

    def note_fault(self) -> None:
        """Note that a unit was fetched only when it was used."""
        self._now.faults += 1

    def note_copy(self, span: Span, n_bytes: int) -> None:
        """Note a copy of so many bytes to the device."""
        self._now.copies.append(span)
        self._now.copied_bytes += n_bytes

    def note_stall(self, span: Span) -> None:
        """Note that a computing stream waits for a copy."""
        self._now.stalls.append(span)


def seconds(spans: Iterable[Span]) -> float:
    """Return how long several took together."""
    return sum(float(begin.elapsed_time(end)) for begin, end in spans) / 1e3
