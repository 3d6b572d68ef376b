"""What grew from step to step, and what outlived its scope."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._show import Paragraph, Part, Report
from tenure.scopes import LeakReport

from ._growth import Growth
from ._layout import COLUMNS, wrapped

_MOST_ROWS = 10
_NOT_SOUGHT = "Leaks were not recorded. Run with --leaks to look for them."
_NOTHING = "Nothing grew from step to step, and nothing outlived a scope that reports."


@dataclass(frozen=True, slots=True, repr=False)
class RecordedLeaks(Report):
    """What grew, and what outlived a scope; false where neither was seen.

    Attributes:
        growth: what held more from step to step, the largest first.
        leaks: reports of scopes whose policy reports.
        were_sought: whether the run looked for leaks.
    """

    growth: tuple[Growth, ...]
    leaks: tuple[LeakReport, ...]
    were_sought: bool = True

    def __bool__(self) -> bool:
        return bool(self.growth or self.leaks)

    def __repr__(self) -> str:
        return f"<RecordedLeaks of {len(self.growth)} places and {len(self.leaks)} scopes>"

    def __str__(self) -> str:
        return "\n\n".join(part.text() for part in self._parts())

    def _parts(self) -> list[Part]:
        if not self:
            return [Paragraph("", _NOTHING if self.were_sought else _NOT_SOUGHT)]
        parts: list[Part] = []
        if self.growth:
            # held at the end is no growth: it is only where to look
            title = "What grew" if self.growth[0].last_step else "What holds several tensors"
            lines = [wrapped(str(each), COLUMNS, "- ") for each in self.growth[:_MOST_ROWS]]
            if more := len(self.growth) - _MOST_ROWS:
                lines += [f"and {more} more"] * (more > 0)
            parts.append(Paragraph(title, "\n".join(lines)))
        return [*parts, *(Paragraph("", _in_width(report)) for report in self.leaks)]


def _in_width(report: LeakReport) -> str:
    lines = []
    for line in str(report).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(wrapped(line.lstrip(), COLUMNS, indent))
    return "\n".join(lines)
