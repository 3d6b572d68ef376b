"""The module ``__main__`` of another program, made and run as Python makes and runs it.

Invariant: what the program finds in ``sys.argv``, ``sys.path``, ``sys.modules`` and its own names
is what it finds under ``python``. Nothing of torch is imported.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from tenure._errors import CommandError

_MAIN = "__main__"
OnCode = Callable[[CodeType], None]


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is about to run.

    Attributes:
        name: its files are called after it.
        words: they stand behind ``python``.
        argv: its ``sys.argv``.
        first_path: its own entry of ``sys.path``.
        execute: runs it in ``__main__``, and passes its code on before it runs.
        module: the name of a module that was asked for by ``-m``.
        has_path: whether its entry of ``sys.path`` is used, which ``-P`` takes from scripts.
    """

    name: str
    words: list[str]
    argv: list[str]
    first_path: str
    execute: Callable[[OnCode], None]
    module: str = ""
    has_path: bool = not sys.flags.safe_path

    def check_names(self) -> None:
        """Refuse a program that would import a module of Python in place of its own.

        Raises:
            CommandError: a module beside the program has the name of one that tenure has imported.
        """
        names = sys.stdlib_module_names.intersection(sys.modules) - _BEFORE
        for name in sorted(names if self.has_path else ()):
            own = importlib.machinery.PathFinder.find_spec(name, [self.first_path])
            origin = getattr(sys.modules[name].__spec__, "origin", None)
            if own is not None and own.origin not in (None, origin) and origin not in _BUILT_IN:
                raise CommandError(
                    f"{own.origin} has the name of a module of Python that tenure has imported, "
                    "and the program would get that one. Rename the file."
                )

    def become_main(self) -> None:
        """Let this process be that of the program, as far as the program can see."""
        main = types.ModuleType(_MAIN)
        main.__dict__.update(__builtins__=builtins)
        if sys.version_info < (3, 14):  # there, a module has annotations only if its code has
            main.__annotations__ = {}
        _kept.append(sys.modules[_MAIN])
        sys.modules[_MAIN] = main
        sys.argv[:] = self.argv
        # with -P there is no such entry, neither ours nor the program's
        if not sys.flags.safe_path:
            del sys.path[0]
        if self.has_path:
            sys.path.insert(0, self.first_path)


# Python has imported these before it knows the program, which never gets its own.
_BEFORE = frozenset({"encodings", "importlib"})
_BUILT_IN = (None, "built-in", "frozen")
# The module that runs now still has frames that look for their globals.
_kept: list[types.ModuleType] = []


def code_program(code: str, arguments: list[str]) -> Program:
    """Return the program that ``python -c`` runs."""

    def execute(on_code: OnCode) -> None:
        text = textwrap.dedent(code) if sys.version_info >= (3, 14) else code
        _exec(f"{text}\n", "<string>", on_code)

    return Program("code", ["-c", code, *arguments], ["-c", *arguments], "", execute)


def module_program(module: str, arguments: list[str]) -> Program:
    """Return the program that ``python -m`` runs."""
    name = module.rpartition(".")[2]
    words = ["-m", module, *arguments]
    execute = partial(_run_module, module)
    return Program(name, words, ["-m", *arguments], os.getcwd(), execute, module=module)


def script_program(path: str, arguments: list[str]) -> Program:
    """Return what ``python PATH`` runs: a file, a folder or zip file with a ``__main__``, or ``-``.

    Raises:
        CommandError: there is no such file.
    """
    words = [path, *arguments]
    if path == "-":
        if sys.stdin.isatty():
            raise CommandError("- reads the program from the standard input, which is a terminal.")
        return Program("stdin", words, words, "", _run_stdin)
    import pkgutil

    name = os.path.splitext(os.path.basename(os.path.normpath(path)))[0]
    full_path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    # as Python decides it: what an import can look into is run as a package is
    if pkgutil.get_importer(os.fspath(path)) is not None:
        run = partial(_run_module, _MAIN, alter_argv=False)
        return Program(name, words, words, full_path, run, has_path=True)
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise CommandError(
            f"can't open file {full_path!r}: [Errno {error.errno}] {error.strerror}. Name a "
            "script, -m and a module, or -c and code."
        ) from None

    def execute(on_code: OnCode) -> None:
        with open(full_path, "rb") as file:
            source = file.read()
        _exec(source, full_path, on_code, importlib.machinery.SourceFileLoader(_MAIN, full_path))

    return Program(name, words, words, os.path.dirname(os.path.realpath(path)), execute)


def _run_stdin(on_code: OnCode) -> None:
    # all of it at once, as Python reads it if it is no terminal
    _exec(sys.stdin.buffer.read(), "<stdin>", on_code)


def _run_module(name: str, on_code: OnCode, alter_argv: bool = True) -> None:
    own: Any = runpy
    run_code = own._run_code

    def run(code: CodeType, *rest: Any) -> object:
        own._run_code = run_code
        on_code(code)
        return run_code(code, *rest)

    own._run_code = run
    # what Python itself calls for -m: its two frames stand in the tracebacks of both
    own._run_module_as_main(name, alter_argv)


def _exec(source: str | bytes, path: str, on_code: OnCode, loader: Any = None) -> None:
    code = compile(source, path, "exec", dont_inherit=True)
    space = vars(sys.modules[_MAIN])
    space["__loader__"] = loader or importlib.machinery.BuiltinImporter
    if path != "<string>":
        space.update(__file__=path, __cached__=None)
    on_code(code)
    exec(code, space)
