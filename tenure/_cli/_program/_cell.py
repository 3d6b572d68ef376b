"""A cell of a notebook, run in this process as a program is, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tenure._cells import Expression, run_cell
from tenure._show import Paragraph, Part, Shown

from ._errors_of_theirs import end_of
from ._instruments import Instrument
from ._measuring import Measuring, Wanted, facts_of, say

if TYPE_CHECKING:
    from tenure.profiler import LineProfiler, Recording, SnapshotDiff

_TO_ITS_END = "came to its end"


class CellReport(Shown):
    """What a cell took, and what it left.

    Args:
        recording: of the cell.
        left: what came and went with it; None where that was not looked for.
    """

    def __init__(self, recording: Recording, left: SnapshotDiff | None) -> None:
        self._recording, self._left = recording, left

    def __str__(self) -> str:
        return "\n\n".join(part.text() for part in self._parts())

    def __repr__(self) -> str:
        return str(self)

    def _parts(self) -> list[Part]:
        from dataclasses import replace

        # what the cells before have made is in the file, and no news
        growth = tuple(each for each in self._recording.growth if each.last_step)
        parts: list[Part] = [*replace(self._recording, memory=None, growth=growth)._parts()]
        if self._recording.timeline is not None:
            parts += self._recording.tree()._parts()
        if self._left is not None and not self._left:
            parts.append(Paragraph("What the cell left", "nothing"))
        elif self._left is not None:
            (table,) = self._left._parts()
            parts.append(replace(table, title=f"What the cell left: {table.title}"))
        return parts


class CellLines(Instrument):
    """``--lines`` of a cell, whose functions it may define itself.

    Args:
        asked: expressions for functions.

    Attributes:
        look: is to be called before each statement.
    """

    def __init__(self, asked: list[Expression]) -> None:
        super().__init__()
        self._asked = asked
        self._profiler: LineProfiler | None = None

    def begin(self) -> None:
        from tenure.profiler import LineProfiler

        self._profiler = LineProfiler()
        self.look()
        self._profiler.enable()

    def look(self) -> None:
        """Measure the functions that are there by now."""
        from tenure.profiler import ProfilerUsageError

        for each in self._asked:
            function = each.value()
            try:
                if function is not None and self._profiler is not None:
                    self._profiler.add_function(function)
            except ProfilerUsageError as error:
                self.notes.append(f"--lines: {error}")

    def end(self, error: BaseException | None) -> None:
        if self._profiler is not None:
            # what only the last statement has defined was not misspelled
            self.look()
            self._profiler.disable()

    def found(self) -> dict[str, Any]:
        self.notes += [f"--lines: {each.missing}" for each in self._asked if not each.is_known]
        if self._profiler is None or not self._profiler.functions:
            return {}
        return {"lines": self._profiler.display()}


def run_cell_recorded(
    shell: Any,
    code: str,
    wanted: Wanted,
    functions: list[Expression],
    command: tuple[str, ...],
    told: Callable[[Recording, CellReport], None],
) -> None:
    """Run a cell, and record it; an error of the cell goes on, after what was found is told.

    Args:
        shell: the ``InteractiveShell``.
        code: of the cell; its first line is the line of the magic.
        wanted: what is measured.
        functions: whose lines are measured as well.
        command: the magic, as it was written.
        told: is called with what was found, in any case.
    """
    from tenure.profiler import snapshot

    lines = CellLines(functions)
    measuring = Measuring(wanted, lines if functions else None, say)
    before = snapshot() if wanted.leaks else None
    began_at, began = datetime.now(UTC).isoformat(timespec="seconds"), perf_counter()

    def ended(error: BaseException | None) -> None:
        duration_s = perf_counter() - began
        measuring.end(error)
        end = end_of(error)
        end = end._replace(text=_TO_ITS_END) if error is None else end
        recording = measuring.recording(facts_of(command, began_at, duration_s, end), [])
        after = measuring.at_end()
        left = None if before is None or after is None else after.diff(before)
        told(recording, CellReport(recording, left))

    measuring.begin()
    try:
        run_cell(shell, code, lines.look)
    except BaseException as error:
        ended(error)
        raise
    ended(None)
