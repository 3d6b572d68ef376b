"""What grew from step to step, and what outlived its scope."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tenure._show import Paragraph, Part, Report, Table
from tenure._text import counted
from tenure.scopes import LeakReport

from ._growth import LOOKS, Growth

MOST_ROWS = 10
"""The rows of each table of a recording, which has many."""
_NO_LEAKS = "Nothing outlived a scope that reports."
_NOT_SOUGHT = "Leaks were not recorded. Run with --leaks to look for them."
# A look counts if it is in all but the first eighth of the steps, of which there are enough.
_LATE, _STEPS = 8, 8


@dataclass(frozen=True, slots=True, repr=False)
class RecordedLeaks(Report):
    """What grew, and what outlived a scope; false where neither was seen.

    Attributes:
        growth: what held more from step to step, the largest first.
        leaks: reports of scopes whose policy reports.
        were_sought: whether the run looked for leaks.
        n_looks: how often it looked for growth; None where that was not recorded.
        look_steps: how many steps there were before the last looks and, if steps came after them,
            before the end.
        n_steps: how many steps there were; None where that was not recorded.
    """

    growth: tuple[Growth, ...]
    leaks: tuple[LeakReport, ...]
    were_sought: bool = True
    n_looks: int | None = None
    look_steps: tuple[int, ...] = ()
    n_steps: int | None = None

    _is_spaced = True

    def __bool__(self) -> bool:
        return bool(self.growth or self.leaks)

    def __repr__(self) -> str:
        return f"<RecordedLeaks of {len(self.growth)} places and {len(self.leaks)} scopes>"

    def no_growth(self) -> str:
        """Return the sentence for looks that saw no growth."""
        if self.n_looks is None:
            return "Nothing grew from step to step."
        times = f"looked {counted(self.n_looks, 'time')}"
        n_steps = self.n_steps or 0
        if n_steps:
            times += f" in {counted(n_steps, 'step')}"
        late = {step for step in self.look_steps if step * _LATE >= n_steps}
        n_late = self.n_looks if self.n_steps is None else len(late)
        if n_late < LOOKS or (self.n_steps is not None and n_steps < _STEPS):
            return (
                f"Not enough looks to judge growth: {times}. It takes {LOOKS} in the last seven "
                f"eighths of at least {_STEPS} steps of an optimizer, or calls of a model."
            )
        before = [step for step in self.look_steps if step != n_steps]
        if before and n_steps in self.look_steps:
            times += f", before the end after step {before[-1]}"
        return f"Nothing grew from step to step: {times}."

    def _parts(self) -> list[Part]:
        if not self:
            told = f"{self.no_growth()} {_NO_LEAKS}" if self.were_sought else _NOT_SOUGHT
            return [Paragraph("", told)]
        parts: list[Part] = []
        if self.growth:
            lines = [f"- {each}" for each in self.growth[:MOST_ROWS]]
            if (more := len(self.growth) - MOST_ROWS) > 0:
                lines.append(f"and {more} more")
            if self.n_looks is not None:
                lines.append(f"Looked {counted(self.n_looks, 'time')}.")
            parts.append(Paragraph("What grew", "\n".join(lines)))
        tables = [part for report in self.leaks for part in report._parts()]
        return parts + [replace(each, most=MOST_ROWS) for each in tables if isinstance(each, Table)]
