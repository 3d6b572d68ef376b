"""What grew from step to step, and what outlived its scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tenure._show import Paragraph, Part, Report, Table
from tenure._text import counted
from tenure.scopes import LeakReport

from ._growth import LOOKS, Growth

MOST_ROWS = 10
"""The rows of each table of a recording, which has many."""
_NOT_SOUGHT = "Leaks were not recorded. Run with --leaks to look for them."
_NO_GROWTH = "Nothing grew from step to step"
# A look counts if it is in all but the first eighth of the steps, of which there are enough.
_LATE, _STEPS = 8, 8
_NO_LEAKS = "nothing outlived a scope that reports."


def no_growth(n_looks: int, steps: Sequence[int], n_steps: int | None) -> str:
    """Return the sentence for so many looks that saw no growth.

    Args:
        n_looks: how often it looked.
        steps: how many steps there were before the last looks, the end included.
        n_steps: how many steps there were; None where that was not recorded.
    """
    times = f"looked {counted(n_looks, 'time')}"
    if n_steps:
        times += f" in {counted(n_steps, 'step')}"
    late = [step for step in steps if step * _LATE >= (n_steps or 0)]
    n_late = n_looks if n_steps is None else len(set(late))
    if n_late < LOOKS or (n_steps is not None and n_steps < _STEPS):
        return (
            f"Not enough looks to judge growth: {times}. It takes {LOOKS} in the last seven "
            f"eighths of at least {_STEPS} steps of an optimizer, or calls of a model."
        )
    before = [step for step in steps if step != n_steps]
    if before and n_steps in steps:
        times += f", before the end after step {before[-1]}"
    return f"{_NO_GROWTH}: {times}."


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
                lines.append(looks if is_judged else self._no_growth(self.n_looks))
            parts.append(Paragraph(title, "\n".join(lines)))
        tables = [part for report in self.leaks for part in report._parts()]
        return [
            *parts,
            *(replace(table, most=MOST_ROWS) for table in tables if isinstance(table, Table)),
        ]

    def _nothing(self) -> str:
        if self.n_looks is None:
            return f"{_NO_GROWTH}, and {_NO_LEAKS}"
        return f"{self._no_growth(self.n_looks)} {_NO_LEAKS[0].upper()}{_NO_LEAKS[1:]}"

    def _no_growth(self, n_looks: int) -> str:
        return no_growth(n_looks, self.look_steps, self.n_steps)
