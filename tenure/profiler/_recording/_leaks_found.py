"""What grew from step to step, and what outlived its scope."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tenure._show import Paragraph, Part, Report, Table
from tenure.scopes import LeakReport

from ._growth import Growth

MOST_ROWS = 10
"""The rows of each table of a recording, which has many."""
_NOTHING = "Nothing grew from step to step, and nothing outlived a scope that reports."


@dataclass(frozen=True, slots=True, repr=False)
class RecordedLeaks(Report):
    """What grew, and what outlived a scope; false where neither was seen.

    Attributes:
        growth: what held more from step to step, the largest first.
        leaks: reports of scopes whose policy reports.
    """

    growth: tuple[Growth, ...]
    leaks: tuple[LeakReport, ...]

    _between = "\n\n"

    def __bool__(self) -> bool:
        return bool(self.growth or self.leaks)

    def __repr__(self) -> str:
        return f"<RecordedLeaks of {len(self.growth)} places and {len(self.leaks)} scopes>"

    def _parts(self) -> list[Part]:
        if not self:
            return [Paragraph("", _NOTHING)]
        parts: list[Part] = []
        if self.growth:
            # held at the end is no growth: it is only where to look
            title = "What grew" if self.growth[0].last_step else "What holds several tensors"
            lines = [f"- {each}" for each in self.growth[:MOST_ROWS]]
            if more := len(self.growth) - MOST_ROWS:
                lines += [f"and {more} more"] * (more > 0)
            parts.append(Paragraph(title, "\n".join(lines)))
        tables = [part for report in self.leaks for part in report._parts()]
        return [
            *parts,
            *(replace(table, most=MOST_ROWS) for table in tables if isinstance(table, Table)),
        ]
