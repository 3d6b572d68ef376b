"""A cell of a notebook, run in this process as a program is, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tenure._cells import Named, run_cell

from ._ends import end_of
from ._measuring import Found, Measuring, Wanted, facts_of

if TYPE_CHECKING:
    from tenure.profiler import LineProfiler, Recording, SnapshotDiff

_TO_ITS_END = "came to its end"


class CellLines:
    """``--lines`` of a cell, whose functions it may define itself.

    Args:
        named: the functions.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self._profiler: LineProfiler | None = None

    def look(self) -> None:
        """Measure the functions that are there by now; to be called before each statement."""
        if self._profiler is not None:
            self._named.add_to(self._profiler)

    def measured(self, notes: list[str]) -> Found:
        """Measure them from now on."""
        from tenure.profiler import LineProfiler

        self._profiler = LineProfiler()
        with self._profiler:
            yield
            # what only the last statement has defined was not misspelled
            self.look()
        yield
        notes += [f"--lines: {missing}" for missing in self._named.missing.values()]
        return {"lines": self._profiler.display()} if self._profiler.functions else {}


def run_cell_recorded(
    shell: Any,
    code: str,
    wanted: Wanted,
    functions: Named,
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
    measuring = Measuring(wanted, lines if wanted.lines else None)
    before = snapshot() if wanted.leaks else None
    began_at, began = datetime.now(UTC).isoformat(timespec="seconds"), perf_counter()

    def ended(error: BaseException | None) -> None:
        duration_s = perf_counter() - began
        measuring.end(error)
        end = end_of(error)
        end = end._replace(text=_TO_ITS_END) if error is None else end
        recording = measuring.recording(facts_of(command, began_at, duration_s, end), [])
        after = measuring.at_end
        left = None if before is None or after is None else after.diff(before)
        told(recording, left)

    measuring.begin()
    try:
        run_cell(shell, code, lines.look)
    except BaseException as error:
        ended(error)
        raise
    ended(None)
