"""A cell of a notebook, run in this process as a program is, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tenure._cells import Expression, run_cell

from ._errors_of_theirs import end_of
from ._instrument import Instrument
from ._measuring import Measuring, Wanted, facts_of, say

if TYPE_CHECKING:
    from tenure.profiler import LineProfiler, Recording, SnapshotDiff

_TO_ITS_END = "came to its end"


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
    told: Callable[[Recording, SnapshotDiff | None], None],
) -> None:
    """Run a cell, and record it; an error of the cell goes on, after what was found is told.

    Args:
        shell: the ``InteractiveShell``.
        code: of the cell; its first line is the line of the magic.
        wanted: what is measured.
        functions: whose lines are measured as well.
        command: the magic, as it was written.
        told: is called with what was found, and what the cell left if that was looked for; in any
            case.
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
        told(recording, left)

    measuring.begin()
    try:
        run_cell(shell, code, lines.look)
    except BaseException as error:
        ended(error)
        raise
    ended(None)
