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
from functools import partial
from types import CodeType
from typing import Any

import tenure
from tenure._errors import CommandError

MAIN = "__main__"
OnCode = Callable[[CodeType], None]
# Python has imported these before it knows the program, which never gets its own.
_BEFORE = frozenset({"encodings", "importlib"})
_BUILT_IN = (None, "built-in", "frozen")
# The module that runs now still has frames that look for their globals.
_kept: list[types.ModuleType] = []


class Program:
    """A program that is about to run: a file, or a folder or zip file with a ``__main__``.

    Args:
        flag: "-m" for a module, "-c" for code, else "".
        words: the program and its arguments.

    Attributes:
        name: its files are called after it.
        words: they stand behind ``python``.
        argv: its ``sys.argv``.
        own_names: what else than ``__main__`` its module is called.
        execute: runs it in ``__main__``, and passes its code on before it runs.

    Raises:
        CommandError: there is no such file.
    """

    def __init__(self, flag: str, words: list[str]) -> None:
        first, *arguments = words
        self.words = [flag, *words] if flag else words
        self.argv = [flag, *arguments] if flag else words
        self.own_names = (first, os.path.basename(first))
        # -P takes its entry of sys.path from a script
        self._path, self._has_path = "", not sys.flags.safe_path
        self.execute: Callable[[OnCode], None]
        if flag == "-c":
            self.name = "code"
            text = textwrap.dedent(first) if sys.version_info >= (3, 14) else first
            self.execute = partial(_exec, lambda: f"{text}\n", "<string>", None)
        elif flag == "-m":
            self.name, self._path = first.rpartition(".")[2], os.getcwd()
            self.own_names = (first, f"{first}.{MAIN}")
            self.execute = partial(_run_module, first, True)
        else:
            self._find(first)

    def _find(self, path: str) -> None:
        import pkgutil

        self.name = os.path.splitext(os.path.basename(os.path.normpath(path)))[0]
        full_path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
        # as Python decides it: what an import can look into is run as a package is
        if pkgutil.get_importer(os.fspath(path)) is not None:
            self._path, self._has_path = full_path, True
            self.execute = partial(_run_module, MAIN, False)
            return
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise CommandError(
                f"can't open file {full_path!r}: [Errno {error.errno}] {error.strerror}. Name a "
                "script, -m and a module, or -c and code."
            ) from None

        def read() -> bytes:
            with open(full_path, "rb") as file:
                return file.read()

        self._path = os.path.dirname(os.path.realpath(path))
        loader = importlib.machinery.SourceFileLoader(MAIN, full_path)
        self.execute = partial(_exec, read, full_path, loader)

    def check_names(self) -> None:
        """Refuse a program that would import a module of Python in place of its own.

        Raises:
            CommandError: a module beside the program has the name of one that tenure has imported.
        """
        names = sys.stdlib_module_names.intersection(sys.modules) - _BEFORE
        for name in sorted(names if self._has_path else ()):
            own = importlib.machinery.PathFinder.find_spec(name, [self._path])
            origin = getattr(sys.modules[name].__spec__, "origin", None)
            if own is not None and own.origin not in (None, origin) and origin not in _BUILT_IN:
                raise CommandError(
                    f"{own.origin} has the name of a module of Python that tenure has imported, "
                    "and the program would get that one. Rename the file."
                )

    def become_main(self) -> None:
        """Let this process be that of the program, as far as the program can see."""
        main = types.ModuleType(MAIN)
        main.__dict__.update(__builtins__=builtins)
        if sys.version_info < (3, 14):  # there, a module has annotations only if its code has
            main.__annotations__ = {}
        _kept.append(sys.modules[MAIN])
        sys.modules[MAIN] = main
        sys.argv[:] = self.argv
        # pytest would warn that tenure is imported and its assertions can't be rewritten
        tenure.__doc__ = f"{tenure.__doc__}\nPYTEST_DONT_REWRITE\n"
        # with -P there is no such entry, neither ours nor the program's
        if not sys.flags.safe_path:
            del sys.path[0]
        if self._has_path:
            sys.path.insert(0, self._path)


def _run_module(name: str, alter_argv: bool, on_code: OnCode) -> None:
    own: Any = runpy
    run_code = own._run_code

    def run(code: CodeType, *rest: Any) -> object:
        own._run_code = run_code
        on_code(code)
        return run_code(code, *rest)

    own._run_code = run
    # what Python itself calls for -m: its two frames stand in the tracebacks of both
    own._run_module_as_main(name, alter_argv)


def _exec(read: Callable[[], str | bytes], path: str, loader: Any, on_code: OnCode) -> None:
    code = compile(read(), path, "exec", dont_inherit=True)
    space = vars(sys.modules[MAIN])
    space["__loader__"] = loader or importlib.machinery.BuiltinImporter
    if path != "<string>":
        space.update(__file__=path, __cached__=None)
    on_code(code)
    exec(code, space)
