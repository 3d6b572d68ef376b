"""What grew from step to step, and what outlived its scope."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tenure._show import Paragraph, Part, Report, Table
from tenure._text import counted
from tenure.scopes import LeakReport

from ._growth import Growth
from ._judged import LOOKS

MOST_ROWS = 10
"""The rows of each table of a recording, which has many."""
_NOT_SOUGHT = "Leaks were not recorded. Run with --leaks to look for them."
_NO_GROWTH = "Nothing grew from step to step"
_NO_LEAKS = "nothing outlived a scope that reports."


def no_growth(n_looks: int) -> str:
    """Return the sentence for so many looks that saw no growth."""
    times = f"looked {counted(n_looks, 'time')}"
    if n_looks < LOOKS:
        return (
            f"Not enough looks to judge growth: {times}. It takes {LOOKS}: after steps of an "
            "optimizer, between calls of a model, and at the end."
        )
    return f"{_NO_GROWTH}: {times}."


@dataclass(frozen=True, slots=True, repr=False)
class RecordedLeaks(Report):
    """What grew, and what outlived a scope; false where neither was seen.

    Attributes:
        growth: what held more from step to step, the largest first.
        leaks: reports of scopes whose policy reports.
        were_sought: whether the run looked for leaks.
        n_looks: how often it looked for growth; None where that was not recorded.
    """

    growth: tuple[Growth, ...]
    leaks: tuple[LeakReport, ...]
    were_sought: bool = True
    n_looks: int | None = None

    _between = "\n\n"

    def __bool__(self) -> bool:
        return bool(self.growth or self.leaks)

    def __repr__(self) -> str:
        return f"<RecordedLeaks of {len(self.growth)} places and {len(self.leaks)} scopes>"

    def _parts(self) -> list[Part]:
        if not self:
            return [Paragraph("", self._nothing() if self.were_sought else _NOT_SOUGHT)]
        parts: list[Part] = []
        if self.growth:
            # held at the end is no growth: it is only where to look
            title = "What grew" if self.growth[0].last_step else "What holds several tensors"
            lines = [f"- {each}" for each in self.growth[:MOST_ROWS]]
            if more := len(self.growth) - MOST_ROWS:
                lines += [f"and {more} more"] * (more > 0)
            if self.n_looks is not None:
                is_judged = self.growth[0].last_step and self.n_looks >= LOOKS
                looks = f"Looked {counted(self.n_looks, 'time')}."
                lines.append(looks if is_judged else no_growth(self.n_looks))
            parts.append(Paragraph(title, "\n".join(lines)))
        tables = [part for report in self.leaks for part in report._parts()]
        return [
            *parts,
            *(replace(table, most=MOST_ROWS) for table in tables if isinstance(table, Table)),
        ]

    def _nothing(self) -> str:
        if self.n_looks is None:
            return f"{_NO_GROWTH}, and {_NO_LEAKS}"
        return f"{no_growth(self.n_looks)} {_NO_LEAKS[0].upper()}{_NO_LEAKS[1:]}"
