"""A cell of a notebook, run as ``tenure run`` runs a program, and the report of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from tenure._cells import Named, run_cell
from tenure._show import Paragraph, Part, Shown, Together
from tenure.profiler import LineProfiler, Recording, SnapshotDiff, snapshot

from ._program import Measuring, end_of


class CellReport(Shown):
    """What a cell took, and what it left.

    Args:
        recording: of the cell.
        left: what came and went with it; None where that was not looked for.
    """

    _is_spaced = True

    def __init__(self, recording: Recording, left: SnapshotDiff | None) -> None:
        self.recording, self._left = recording, left

    def __repr__(self) -> str:
        return str(self)

    def _parts(self) -> list[Part]:
        # what the cells before have made is in the file, and no news
        parts: list[Part] = [*replace(self.recording, memory=None)._parts()]
        if self.recording.timeline is not None:
            parts += self.recording.tree()._parts()
        if self._left is not None and not self._left:
            parts.append(Paragraph("What the cell left", "nothing"))
        elif self._left is not None:
            parts.append(Together("What the cell left", self._left._parts()))
        return parts


class _Lines:
    """``--lines`` of a cell, whose functions it may define itself."""

    def __init__(self, named: Named) -> None:
        self._named = named
        self._profiler = LineProfiler()

    def look(self) -> None:
        """Measure the functions that are there by now."""
        self._named.add_to(self._profiler)

    def profiler(self) -> LineProfiler:
        """Return what measures them."""
        return self._profiler

    def found(self, profiler: LineProfiler) -> dict[str, Any]:
        """Return their figures, and what is missing, as fields of a recording."""
        # what only the last statement has defined was not misspelled
        self.look()
        notes = [f"--lines: {missing}" for missing in self._named.missing.values()]
        return {"lines": profiler.display() if profiler.functions else None, "notes": notes}


class RecordedCell:
    """A cell that is recorded while it runs.

    Args:
        wanted: the options of the magic.
        functions: whose lines are measured as well.
        command: the magic, as it was written.
    """

    def __init__(
        self, wanted: argparse.Namespace, functions: Named, command: tuple[str, ...]
    ) -> None:
        self._lines = _Lines(functions)
        self._before = snapshot() if wanted.leaks else None
        self._measuring = Measuring(command, wanted, self._lines if wanted.lines else None)

    def run(self, shell: Any, code: str) -> None:
        """Run the code; its first line is the line of the magic."""
        self._measuring.begin()
        run_cell(shell, code, self._lines.look)

    def ended(self, error: BaseException | None) -> CellReport:
        """Measure no more, and return what was found.

        Args:
            error: the error of the cell.
        """
        self._measuring.end(error)
        end = end_of(error)
        end = end._replace(text="came to its end") if error is None else end
        after = self._measuring.at_end
        left = None if self._before is None or after is None else after.diff(self._before)
        return CellReport(self._measuring.recording(end, []), left)
