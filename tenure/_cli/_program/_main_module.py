"""The module ``__main__`` of another program, made and run as Python makes and runs it.

Invariant: what the program finds in ``sys.argv``, ``sys.path``, ``sys.modules`` and its own names
is what it finds under ``python``. Nothing of torch is imported.

Source: ``pymain_run_python`` in ``Modules/main.c`` and ``_PyRun_SimpleFile`` in
``Python/pythonrun.c`` of CPython.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import linecache
import os
import re
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

from tenure._errors import CommandError

from ._own_modules import own_modules

_MAIN = "__main__"
_IS_3_14 = sys.version_info >= (3, 14)
OnCode = Callable[[CodeType], None]


class Program(ABC):
    """What is run.

    Args:
        argv: ``sys.argv`` of the program.
    """

    kind: ClassVar[str]

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv

    @property
    @abstractmethod
    def name(self) -> str:
        """What its files are called after."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs it."""
        return ("python", *self._arguments)

    @property
    @abstractmethod
    def _arguments(self) -> list[str]: ...

    @property
    @abstractmethod
    def _first_path(self) -> str: ...

    def become_main(self) -> None:
        """Let this process be that of the program, as far as the program can see."""
        main = types.ModuleType(_MAIN)
        main.__dict__.update(__builtins__=builtins)
        if not _IS_3_14:  # there, a module has annotations only if its code has
            main.__annotations__ = {}
        _kept.append(sys.modules[_MAIN])
        sys.modules[_MAIN] = main
        sys.orig_argv[:] = [*_interpreter(), *self._arguments]
        sys.argv[:] = self.argv
        self._put_path()

    def _put_path(self) -> None:
        # with -P there is no such entry, neither ours nor the program's
        if not sys.flags.safe_path:
            sys.path[0] = self._first_path
            own_modules.give_to(self._first_path)

    @abstractmethod
    def execute(self, on_code: OnCode) -> None:
        """Run it; what it raises goes on.

        Args:
            on_code: is told the code of ``__main__`` before it runs, where it is compiled here.
        """

    def after(self) -> None:  # noqa: B027  # most have nothing to do
        """Undo what Python undoes once the program has run, or has told its error."""


# The module that runs now still has frames that look for their globals.
_kept: list[types.ModuleType] = []


class _Code(Program):
    kind = "code"

    def __init__(self, code: str, arguments: list[str]) -> None:
        super().__init__(["-c", *arguments])
        self._code = code

    @property
    def name(self) -> str:
        return "code"

    @property
    def _arguments(self) -> list[str]:
        return ["-c", self._code, *self.argv[1:]]

    @property
    def _first_path(self) -> str:
        return ""

    def execute(self, on_code: OnCode) -> None:
        sys.modules[_MAIN].__loader__ = importlib.machinery.BuiltinImporter
        text = self._code
        if _IS_3_14:
            import textwrap

            text = textwrap.dedent(text)
        code = compile(f"{text}\n", "<string>", "exec", dont_inherit=True)
        if _IS_3_14:  # Python 3.13 shows the source too, but finds it in another way
            _show_in_tracebacks(code, text)
        on_code(code)
        exec(code, sys.modules[_MAIN].__dict__)


def _show_in_tracebacks(code: CodeType, text: str) -> None:
    # Python has no public function for it
    register: Any = getattr(linecache, "_register_code", None)
    if register is not None:
        register(code, text, code.co_filename)


class _File(Program):
    kind = "script"

    def __init__(self, path: str, arguments: list[str]) -> None:
        super().__init__([path, *arguments])
        self._path = path

    @property
    def name(self) -> str:
        return os.path.splitext(os.path.basename(os.path.normpath(self._path)))[0]

    @property
    def _arguments(self) -> list[str]:
        return list(self.argv)

    @property
    def _first_path(self) -> str:
        return os.path.dirname(os.path.realpath(self._path))

    def execute(self, on_code: OnCode) -> None:
        main = sys.modules[_MAIN]
        path = _absolute(self._path)
        main.__dict__.update(__file__=path, __cached__=None)
        main.__loader__ = importlib.machinery.SourceFileLoader(_MAIN, path)
        code = _compiled(path)
        on_code(code)
        exec(code, main.__dict__)

    def after(self) -> None:
        for name in ("__file__", "__cached__"):
            sys.modules[_MAIN].__dict__.pop(name, None)


class _Stdin(_File):
    kind = "standard input"

    @property
    def name(self) -> str:
        return "stdin"

    @property
    def _first_path(self) -> str:
        return ""

    def execute(self, on_code: OnCode) -> None:
        main = sys.modules[_MAIN]
        main.__dict__.update(__file__="<stdin>", __cached__=None)
        main.__loader__ = importlib.machinery.BuiltinImporter
        # all of it at once, as Python reads it where it is no terminal
        code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
        on_code(code)
        exec(code, main.__dict__)


class _Folder(_File):
    """A folder, or a zip file, with ``__main__.py`` in it."""

    kind = "folder"

    def _put_path(self) -> None:
        # Python sets it even with -P, and has no other entry for the program then
        first = [] if sys.flags.safe_path else sys.path[:1]
        del sys.path[: len(first)]
        sys.path.insert(0, _absolute(self._path))

    def execute(self, on_code: OnCode) -> None:
        import runpy

        runpy._run_module_as_main(_MAIN, alter_argv=False)  # type: ignore[attr-defined]  # Python's own

    def after(self) -> None:
        pass


class _Module(Program):
    kind = "module"

    def __init__(self, module: str, arguments: list[str]) -> None:
        super().__init__(["-m", *arguments])
        self.module = module

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def _arguments(self) -> list[str]:
        return ["-m", self.module, *self.argv[1:]]

    @property
    def _first_path(self) -> str:
        return os.getcwd()

    def execute(self, on_code: OnCode) -> None:
        import runpy

        # what Python itself calls for -m: its two frames stand in the tracebacks of both
        runpy._run_module_as_main(self.module)  # type: ignore[attr-defined]  # Python's own


def code_program(code: str, arguments: list[str]) -> Program:
    """What ``python -c`` runs."""
    return _Code(code, arguments)


def module_program(module: str, arguments: list[str]) -> Program:
    """What ``python -m`` runs."""
    return _Module(module, arguments)


def script_program(path: str, arguments: list[str]) -> Program:
    """What ``python PATH`` runs: a file, a folder or a zip file with a ``__main__``, or ``-``.

    Raises:
        CommandError: there is no such file.
    """
    if path == "-":
        if sys.stdin.isatty():
            raise CommandError("- reads the program from the standard input, which is a terminal.")
        return _Stdin(path, arguments)
    import pkgutil

    # as Python decides it: what an import can look into is run as a package is
    if pkgutil.get_importer(os.fspath(path)) is not None:
        return _Folder(path, arguments)
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise CommandError(
            f"can't open file {_absolute(path)!r}: [Errno {error.errno}] {error.strerror}. Name a "
            "script, -m and a module, or -c and code."
        ) from None
    return _File(path, arguments)


def _absolute(path: str) -> str:
    """As Python spells the file of ``__main__``: in the current folder, and not made shorter."""
    if os.path.isabs(path):
        return path
    return os.path.join(os.getcwd(), path)


def _compiled(path: str) -> CodeType:
    with open(path, "rb") as file:
        if path.endswith(".pyc"):
            import pkgutil

            code: CodeType | None = pkgutil.read_code(file)
            if code is not None:
                return code
            file.seek(0)
        source = file.read()
    _check_encoding(source, path)
    return compile(source, path, "exec", dont_inherit=True)


def _check_encoding(source: bytes, path: str) -> None:
    """Refuse bytes that are no UTF-8, which ``compile()`` lets pass in a comment.

    Raises:
        SyntaxError: as Python raises it of a file, before any other error in it.
    """
    try:
        source.decode()
        return
    except UnicodeDecodeError as error:
        at = error.start
    lines = source.splitlines()[:2]
    if any(re.match(rb"[ \t\f]*#.*?coding[:=][ \t]*[-\w.]+", line) for line in lines):
        return
    n_line = source.count(b"\n", 0, at) + 1
    raise SyntaxError(
        f"Non-UTF-8 code starting with '\\x{source[at]:02x}' in file {path} on line {n_line}, but "
        "no encoding declared; see https://peps.python.org/pep-0263/ for details"
    )


def _interpreter() -> list[str]:
    """How Python itself was called: its name and its options, without what it was to run."""
    before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    # the path of a command; or -m and a name
    del before[-1:]
    if before[-1:] == ["-m"]:
        del before[-1:]
    return before
