"""Running a statement or a cell of a notebook under a line profiler.

A cell runs statement by statement, and before each the functions to profile are looked up again, so
what the cell defines is profiled like what was there before. What was collected is shown in any
case; an error of the statement then goes on.

IPython is imported when the extension is loaded, and not before.
"""

from __future__ import annotations

import getopt
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenure._cells import Expression, add_magic, remove_magic, run_cell, usage_error
from tenure._errors import ProfilerUsageError

from ._display import DEFAULT_COLUMNS, RecordsDisplay, columns_named
from ._line_profiler import LineProfiler

_NAME = "mlrun"
_SHORT = "f:c:Drg:d:qT:"
_LONG = {
    "function=": "f", "column=": "c", "no_default_columns": "D", "no-default-columns": "D",
    "return-profiler": "r", "gpu=": "g", "device=": "d", "quiet": "q", "dump-profile=": "T",
}  # fmt: skip
# Words end at spaces outside of quotes.
_WORD = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[^\s"'])+)""")
_OPTION = re.compile(r"""\s*(-(?:"[^"]*"|'[^']*'|[^\s"'])+)""")
_ONCE = {"g": "--gpu", "d": "--device", "T": "--dump-profile"}


def load_ipython_extension(shell: Any) -> None:
    """Add ``%mlrun`` and ``%%mlrun`` to a shell; IPython calls this for ``%load_ext``.

    Args:
        shell: the ``InteractiveShell``.
    """
    add_magic(shell, _NAME, mlrun, "line_cell")


def unload_ipython_extension(shell: Any) -> None:
    """Take them away again; what had the name before has it again.

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
        What to profile: an expression whose value is a function, such as ``Model.forward``. More of
        them with more ``-f``. The statement or cell may define it.
    -c COLUMN, --column COLUMN
        One more column: a field of the device's ``memory_stats()``, or one of ``hits``, ``alloc``,
        ``freed``, ``net``, ``peak``. More of them with more ``-c``.
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
    targets = [_target(expression, shell) for expression in options.functions]
    profiler = _profiler(options)
    with _reported_at_end(profiler, options), profiler:
        run_cell(shell, statement, lambda: _register(targets, profiler))
    # Again: what only the last statement has defined did not run, but was not misspelled either.
    _register(targets, profiler)
    for target in targets:
        if not target.is_known:
            raise usage_error(
                f"%mlrun -f {target.text}: {target.missing}, neither before the code nor "
                "after it, which ran. Check the spelling, or let the code define it."
            )
    return profiler if options.returns else None


@dataclass(frozen=True, slots=True)
class _Options:
    functions: list[str]
    columns: list[str] | None
    gpu: int | None
    device: str | None
    dump: str | None
    returns: bool
    quiet: bool


def _target(expression: str, shell: Any) -> Expression:
    try:
        return Expression(expression, shell)
    except SyntaxError as error:
        raise usage_error(f"%mlrun -f {expression}: {error.msg}.") from None


def _parsed(line: str) -> tuple[_Options, str]:
    pairs, statement = _split(line)
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    twice = next((name for name in _ONCE if len(found.get(name, ())) > 1), None)
    if twice:
        raise usage_error(f"%mlrun {_ONCE[twice]} is given twice.")
    if "f" not in found:
        raise usage_error("%mlrun: name what to profile, with -f FUNCTION.")
    columns = [*(() if "D" in found else DEFAULT_COLUMNS), *found.get("c", ())]
    if not columns:
        raise usage_error("%mlrun -D: name at least one column, with -c COLUMN.")
    return (
        _Options(
            functions=found["f"],
            columns=list(dict.fromkeys(columns)),
            gpu=_index(found["g"][0]) if "g" in found else None,
            device=found["d"][0] if "d" in found else None,
            dump=found["T"][0] if "T" in found else None,
            returns="r" in found,
            quiet="q" in found,
        ),
        statement,
    )


def _split(line: str) -> tuple[list[tuple[str, str]], str]:
    """The options by their short names, and the rest of the line as it was written."""
    pairs: list[tuple[str, str]] = []
    while (match := _OPTION.match(line)) is not None:
        line = line[match.end() :]
        if match[1] == "--":
            break
        try:
            found, _ = getopt.getopt([match[1]], _SHORT, [*_LONG])
        # It may want the next word, which may stand in quotes.
        except getopt.GetoptError:
            value = _WORD.match(line)
            words = [match[1], *([] if value is None else [_unquoted(value[1])])]
            line = line if value is None else line[value.end() :]
            found = _strictly(words)
        pairs += ((_short(name), _unquoted(value)) for name, value in found)
    return pairs, line.strip()


def _strictly(words: list[str]) -> list[tuple[str, str]]:
    try:
        found, left = getopt.getopt(words, _SHORT, [*_LONG])
    except getopt.GetoptError as error:
        raise usage_error(f"%mlrun: {error.msg}. See %mlrun? for what there is.") from None
    assert not left
    return found


def _short(name: str) -> str:
    plain = name.lstrip("-")
    return plain if len(plain) == 1 else _LONG.get(plain) or _LONG[f"{plain}="]


def _unquoted(word: str) -> str:
    is_quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if is_quoted else word


def _index(text: str) -> int:
    if not text.isdecimal():
        raise usage_error(f"%mlrun --gpu {text}: not an index. Name a device with -d.")
    return int(text)


def _profiler(options: _Options) -> LineProfiler:
    profiler = LineProfiler(target_gpu=options.gpu, device=options.device)
    # Before anything runs: a misspelled column must not cost a long statement.
    columns_named(options.columns, ())
    return profiler


def _register(targets: list[Expression], profiler: LineProfiler) -> None:
    for target in targets:
        function = target.value()
        if function is not None:
            profiler.add_function(function)


@contextmanager
def _reported_at_end(profiler: LineProfiler, options: _Options) -> Iterator[None]:
    try:
        yield
    finally:
        # Where no function was found, the error that follows says so.
        try:
            if profiler.functions:
                _report(profiler.display(columns=options.columns), options)
        # A column that this device has not: the rest is still worth showing, after such a run.
        except ProfilerUsageError:
            _report(profiler.display(), options)
            raise


def _report(shown: RecordsDisplay, options: _Options) -> None:
    if not options.quiet:
        from IPython.display import display

        display(shown)
    if options.dump is not None:
        path = Path(options.dump).expanduser()
        path.write_text(f"{shown}\n", "utf-8")
        if not options.quiet:
            print(f"Wrote {path}")
