"""Running a statement or a cell of a notebook under a line profiler.

A cell runs statement by statement, and before each the functions to profile are looked up again, so
what the cell defines is profiled like what was there before. What was collected is shown in any
case; an error of the statement then goes on.

IPython is imported when the extension is loaded, and not before.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from tenure._cells import MagicParser, Named, add_magic, remove_magic, run_cell, usage_error

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
    -g INDEX, --gpu INDEX
        The accelerator to measure, by index.
    -d DEVICE, --device DEVICE
        The device to measure, as torch spells it: ``cpu``, ``cuda:1``.
    -r, --return-profiler
        Give back the LineProfiler, whose ``display()`` chooses columns and functions.
    -q, --quiet
        Show nothing.

    Options end where the statement begins. ``await`` at the top level is not supported.

    Source: ``%mlrun`` of pytorch_memlab.
    """
    options, statement = _parsed(line)
    if cell is not None:
        # What follows the options belongs to the cell, as the first line that runs.
        statement = f"{statement}\n{cell}"
    named = Named(options.function, shell, "%mlrun -f")
    profiler = LineProfiler(target_gpu=options.gpu, device=options.device)
    try:
        with profiler:
            run_cell(shell, statement, lambda: named.add_to(profiler))
            # Again: what only the last statement has defined was not misspelled.
            named.add_to(profiler)
    finally:
        # Where no function was found, the error that follows says so.
        if profiler.functions and not options.quiet:
            from IPython.display import display

            display(profiler.display())
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
    add("-g", "--gpu", type=int)
    add("-d", "--device")
    add("-r", "--return-profiler", action="store_true")
    add("-q", "--quiet", action="store_true")
    add("statement", nargs=argparse.REMAINDER)
    words = list(_WORD.finditer(line))
    options = parser.parse_args([word[0].strip("\"'") for word in words])
    n_left = len(options.statement) - (options.statement[:1] == ["--"])
    return options, line[words[-n_left].start() :] if n_left else ""
