"""What a pass moved and waited for, by events that are read only when a report asks.

Invariant: measuring stops nobody; figures are those of the last pass that ended.
"""

from __future__ import annotations

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
        """A pass begins with this event."""
        self._began = event

    def end(self, event: Any) -> None:
        """It ends with this one."""
        self._now.span = self._began, event
        self.total_faults += self._now.faults
        self.passes += 1
        self.last, self._now = self._now, PassRecord()

    def note_fault(self) -> None:
        """A unit is fetched only when it is used."""
        self._now.faults += 1

    def note_copy(self, span: Span, n_bytes: int) -> None:
        """So many bytes are copied to the device."""
        self._now.copies.append(span)
        self._now.copied_bytes += n_bytes

    def note_stall(self, span: Span) -> None:
        """The stream that computes waits for a copy."""
        self._now.stalls.append(span)
