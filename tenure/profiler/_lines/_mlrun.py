"""Running a statement or a cell of a notebook under a line profiler.

A cell runs statement by statement, and before each the functions to profile are looked up again, so
what the cell defines is profiled like what was there before. What was collected is shown in any
case; an error of the statement then goes on.

IPython is imported when the extension is loaded, and not before.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from tenure._cells import MagicParser, Named, add_magic, remove_magic, run_cell, usage_error

from ._display import DEFAULT_COLUMNS, checked_columns
from ._line_profiler import LineProfiler

_NAME = "mlrun"
# Words end at spaces outside of quotes.
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


def load_ipython_extension(shell: Any) -> None:
    """Add ``%mlrun`` and ``%%mlrun`` to a shell; IPython calls this for ``%load_ext``.

    Args:
        shell: the ``InteractiveShell``.
    """
    add_magic(shell, _NAME, mlrun, "line_cell")


def unload_ipython_extension(shell: Any) -> None:
    """Take them away again.

    Args:
        shell: the ``InteractiveShell``.
    """
    remove_magic(shell, _NAME)


def mlrun(shell: Any, line: str, cell: str | None = None) -> LineProfiler | None:
    """Profile the memory of functions, line by line, while a statement or a cell runs.

    Usage::

        %mlrun -f FUNCTION [options] statement

        %%mlrun -f FUNCTION [options]
        code of the cell

    -f FUNCTION, --function FUNCTION
        What to profile: the name of a function, such as ``Model.forward``. More of them with more
        ``-f``. The statement or cell may define it.
    -c COLUMN, --column COLUMN
        With ``-D``, a column to show: ``hits``, ``alloc``, ``freed``, ``net`` or ``peak``. More of
        them with more ``-c``.
    -D, --no_default_columns
        Only the columns of ``-c``.
    -g INDEX, --gpu INDEX
        The accelerator to measure, by index.
    -d DEVICE, --device DEVICE
        The device to measure, as torch spells it: ``cpu``, ``cuda:1``.
    -r, --return-profiler
        Give back the LineProfiler.
    -q, --quiet
        Show nothing.
    -T FILE, --dump-profile FILE
        Write the table to a text file as well.

    Options end where the statement begins. ``await`` at the top level is not supported.

    Source: ``%mlrun`` of pytorch_memlab.
    """
    options, statement = _parsed(line)
    if cell is not None:
        # What follows the options belongs to the cell, as the first line that runs.
        statement = f"{statement}\n{cell}"
    defaults = () if options.no_default_columns else DEFAULT_COLUMNS
    columns = [*dict.fromkeys([*defaults, *options.column])]
    # Before anything runs: a misspelled column must not cost a long statement.
    checked_columns(columns)
    named = Named(options.function, shell, "%mlrun -f")
    profiler = LineProfiler(target_gpu=options.gpu, device=options.device)
    try:
        with profiler:
            run_cell(shell, statement, lambda: named.add_to(profiler))
            # Again: what only the last statement has defined was not misspelled.
            named.add_to(profiler)
    finally:
        # Where no function was found, the error that follows says so.
        if profiler.functions:
            _report(profiler, columns, options)
    for name, missing in named.missing.items():
        raise usage_error(
            f"%mlrun -f {name}: {missing}, neither before the code nor after it, which ran. Check "
            "the spelling, or let the code define it."
        )
    return profiler if options.return_profiler else None


def _parsed(line: str) -> tuple[argparse.Namespace, str]:
    """Return the options, and the rest of the line as it was written."""
    parser = MagicParser(f"%{_NAME}")
    add = parser.add_argument
    add("-f", "--function", action="append", required=True)
    add("-c", "--column", action="append", default=[])
    add("-D", "--no_default_columns", action="store_true")
    add("-g", "--gpu", type=int)
    add("-d", "--device")
    add("-r", "--return-profiler", action="store_true")
    add("-q", "--quiet", action="store_true")
    add("-T", "--dump-profile", type=Path)
    add("statement", nargs=argparse.REMAINDER)
    words = list(_WORD.finditer(line))
    options = parser.parse_args([word[0].strip("\"'") for word in words])
    n_left = len(options.statement) - (options.statement[:1] == ["--"])
    return options, line[words[-n_left].start() :] if n_left else ""


def _report(profiler: LineProfiler, columns: list[str], options: argparse.Namespace) -> None:
    shown = profiler.display(columns=columns)
    if not options.quiet:
        from IPython.display import display

        display(shown)
    if options.dump_profile is not None:
        path = options.dump_profile.expanduser()
        path.write_text(f"{shown}\n", "utf-8")
        if not options.quiet:
            print(f"Wrote {path}")
