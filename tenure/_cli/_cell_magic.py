"""``%%tenure``: a cell of a notebook under a recording, as ``tenure run`` records a program."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure._cells import MagicParser, Named, add_magic, remove_magic, usage_error
from tenure._errors import CommandError

from ._run import add_measuring, check_target, choose_by_default, shown_path

if TYPE_CHECKING:
    from ._cell import CellReport

_NAME = "tenure"


def load_ipython_extension(shell: Any) -> None:
    """Add all magics of tenure to a shell; IPython calls this for ``%load_ext tenure``."""
    from tenure import profiler

    profiler.load_ipython_extension(shell)
    add_magic(shell, _NAME, tenure_cell, "cell")


def unload_ipython_extension(shell: Any) -> None:
    """Take them away again; IPython calls this for ``%unload_ext tenure``."""
    from tenure import profiler

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
    from ._cell import RecordedCell

    parser = MagicParser(f"%%{_NAME}")
    add_measuring(parser)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise usage_error(f"%%{_NAME}: {error}.") from None
    arguments = parser.parse_args(words)
    path = None if arguments.output is None else Path(arguments.output).expanduser().absolute()
    named = Named(arguments.lines, shell, f"%%{_NAME} --lines")
    try:
        if path is not None:
            check_target(path, replace=arguments.force)
    except CommandError as error:
        raise usage_error(f"%%{_NAME}: {error}") from None
    choose_by_default(arguments, all_but_lines=True)
    recorded = RecordedCell(arguments, named, (f"%%{_NAME}", *words))
    try:
        # the line of the magic is the first
        recorded.run(shell, f"\n{cell}")
    except BaseException as error:
        _tell(recorded.ended(error), path, is_quiet=arguments.quiet)
        raise
    _tell(recorded.ended(None), path, is_quiet=arguments.quiet)


def _tell(report: CellReport, path: Path | None, *, is_quiet: bool) -> None:
    if not is_quiet:
        from IPython.display import display

        display(report)
    if path is not None:
        report.recording.save(path)
        if not is_quiet:
            file = shown_path(path)
            print(f"Wrote {file}. See it with: !tenure report {shlex.quote(file)}")
