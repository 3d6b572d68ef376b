"""``%%tenure``: a cell of a notebook under a recording, as ``tenure run`` records a program."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenure import profiler
from tenure._cells import MagicParser, Named, add_magic, remove_magic, run_cell, usage_error
from tenure._errors import CommandError
from tenure._show import Paragraph, Part, Shown, Together
from tenure.profiler import LineProfiler, Recording, Snapshot, SnapshotDiff, snapshot

from ._program import Measuring, end_of
from ._run import add_measuring, check_target, choose_by_default, shown_path

_NAME = "tenure"
_MAGIC = f"%%{_NAME}"


def load_ipython_extension(shell: Any) -> None:
    """Add all magics of tenure to a shell; IPython calls this for ``%load_ext tenure``."""
    profiler.load_ipython_extension(shell)
    add_magic(shell, _NAME, tenure_cell, "cell")


def unload_ipython_extension(shell: Any) -> None:
    """Take them away again; IPython calls this for ``%unload_ext tenure``."""
    remove_magic(shell, _NAME)
    profiler.unload_ipython_extension(shell)


def tenure_cell(shell: Any, line: str, cell: str) -> None:
    """Run a cell, and show where its memory went: the peak, the lines that made it, what stays.

    Usage::

        %%tenure [options]
        code of the cell

    --leaks
        What the cell left, and what holds more from step to step.
    --timeline
        Live bytes over time, and which lines made what was alive at the peak.
    --on-oom
        Explain the first out-of-memory error.
    --lines FUNC
        Measure each line of a function, by its name, such as ``Model.forward``. More of them with
        more ``--lines``. The cell may define it.
    --budget SIZE
        Raise torch.OutOfMemoryError past so many bytes, as 2GiB, of the accelerator or, where there
        is none, of the CPU.
    -o FILE, --output FILE
        Write the recording to a file, which ``tenure report`` and ``Recording.load`` read.
    -f, --force
        Overwrite FILE.
    -q, --quiet
        Show nothing.

    Without any of the first four all but ``--lines`` are meant. ``await`` at the top level is not
    supported.
    """
    parser = MagicParser(_MAGIC)
    add_measuring(parser)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise usage_error(f"{_MAGIC}: {error}.") from None
    arguments = parser.parse_args(words)
    path = None if arguments.output is None else Path(arguments.output).expanduser().absolute()
    named = Named(arguments.lines, shell, f"{_MAGIC} --lines")
    try:
        if path is not None:
            check_target(path, replace=arguments.force)
    except CommandError as error:
        raise usage_error(f"{_MAGIC}: {error}") from None
    choose_by_default(arguments, all_but_lines=True)
    lines = _CellLines(named)
    before = snapshot() if arguments.leaks else None
    measuring = Measuring((_MAGIC, *words), arguments, lines if arguments.lines else None)
    try:
        measuring.begin()
        # the line of the magic is the first
        run_cell(shell, f"\n{cell}", lines.look)
    except BaseException as error:
        _end(measuring, before, error, path, is_quiet=arguments.quiet)
        raise
    _end(measuring, before, None, path, is_quiet=arguments.quiet)


def _end(
    measuring: Measuring,
    before: Snapshot | None,
    error: BaseException | None,
    path: Path | None,
    *,
    is_quiet: bool,
) -> None:
    """Measure no more, and show and write down what was found."""
    measuring.end(error)
    end = ("came to its end", 0) if error is None else end_of(error)
    after = measuring.at_end
    left = None if before is None or after is None else after.diff(before)
    report = CellReport(measuring.recording(end, []), left)
    if not is_quiet:
        from IPython.display import display

        display(report)
    if path is not None:
        report.recording.save(path)
        if not is_quiet:
            file = shown_path(path)
            print(f"Wrote {file}. See it with: !tenure report {shlex.quote(file)}")


class CellReport(Shown):
    """The memory that a cell took, and what it left.

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


class _CellLines:
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
