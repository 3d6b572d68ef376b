"""What paging moved and waited for, by events that are read only when a report asks.

Invariant: measuring stops nobody; figures are those of the last pass that ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ._link import Link

_Span = tuple[Any, Any]


@dataclass(slots=True)
class PassRecord:
    """One pass, in events.

    Attributes:
        whole: its first and its last event on the stream that computes.
        stalls: the waits of that stream for copies.
        copies: the copies to the device since the pass before ended.
        copied_bytes: what they moved.
        faults: how many units were fetched only when they were used.
    """

    whole: _Span | None = None
    stalls: list[_Span] = field(default_factory=list)
    copies: list[_Span] = field(default_factory=list)
    copied_bytes: int = 0
    faults: int = 0


class Meter:
    """Counts what goes over a link, pass by pass.

    Args:
        link: the streams of the device.

    Attributes:
        last: the last pass that ended; None before the first.
        passes: how many have ended.
        total_faults: of all passes that ended.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._now = PassRecord()
        self._began: Any = None
        self.last: PassRecord | None = None
        self.passes = 0
        self.total_faults = 0

    def begin(self) -> None:
        """A pass begins on the current stream."""
        self._began = self._mark(self._link.current())

    def end(self) -> None:
        """It ends."""
        self._now.whole = self._began, self._mark(self._link.current())
        self.total_faults += self._now.faults
        self.passes += 1
        self.last, self._now = self._now, PassRecord()

    def note_fault(self) -> None:
        """A unit is fetched only when it is used."""
        self._now.faults += 1

    def page_in(self, pairs: list[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """As the link's, counted."""
        before, ready = self._link.page_in(pairs, after)
        self._now.copies.append((before, ready))
        self._now.copied_bytes += sum(to.nbytes for to, _ in pairs)
        return ready

    def let_compute(self, stream: Any, event: Any) -> None:
        """As the link's, counted."""
        before = self._mark(stream)
        self._link.let_compute(stream, event)
        self._now.stalls.append((before, self._mark(stream)))

    def finished(self) -> PassRecord | None:
        """The last pass that ended, when all of it is over: stops the host until then.

        A stream beside that of the pass may go on after it; torch reads no time between events that
        have not both happened.
        """
        if self.last is not None and self.last.whole is not None:
            for span in (self.last.whole, *self.last.copies, *self.last.stalls):
                for event in span:
                    self._link.let_host(event)
        return self.last

    def _mark(self, stream: Any) -> Any:
        return self._link.mark(stream, timed=True)
