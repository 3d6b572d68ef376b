"""``--lines``: the figures of each line of some functions.

A function of the program itself is known by its code, which is found before it runs: so its first
call is seen, whoever makes it. A function of another module is known once that was imported.
"""

from __future__ import annotations

import operator
import sys
import types
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from ._main_module import MAIN
from ._measuring import say

if TYPE_CHECKING:
    from tenure.profiler import LineProfiler


class Lines:
    """The functions that are asked for, each measured from when it is found.

    Args:
        asked: as ``"module:qualname"``, or without a module a name in the program itself.
        main_names: what else the program's own module is called.
    """

    def __init__(self, asked: list[str], main_names: tuple[str, ...]) -> None:
        self._missing = list[tuple[str, str]]()
        for each in asked:
            module, _, name = each.rpartition(":")
            home = MAIN if not module or module in main_names else module
            self._missing.append((home, name))
        self.modules = {home for home, _ in self._missing if home != MAIN}
        self._functions: list[Any] = []
        self._notes: list[str] = []
        self._profiler: LineProfiler | None = None

    def on_code(self, code: CodeType) -> None:
        """Find the functions in the code of the program, which is about to run."""
        for asked in [each for each in self._missing if each[0] == MAIN]:
            self._missing.remove(asked)
            if found := _functions_of(code, asked[1]):
                self._add(*map(_as_function, found))
            else:
                self._notes.append(f"the program has no function {asked[1]} for --lines")
                # before a long run, and not after it
                say(f"tenure run: {self._notes[-1]}")

    def on_module(self, module: str) -> None:
        """Find those of a module, once it was imported."""
        for asked in [each for each in self._missing if each[0] == module]:
            try:
                function = operator.attrgetter(asked[1])(sys.modules[module])
            except AttributeError:
                continue
            self._missing.remove(asked)
            self._add(function)

    def profiler(self) -> LineProfiler:
        """Return what measures them from now on."""
        from tenure.profiler import LineProfiler

        self._profiler = LineProfiler()
        self._add(*self._functions)
        return self._profiler

    def found(self, profiler: LineProfiler) -> dict[str, Any]:
        """Return their figures, and what is missing, as fields of a recording."""
        for module, name in self._missing:
            self._notes.append(f"--lines {name}: {module} has no such function")
        lines = profiler.display() if profiler.functions else None
        return {"lines": lines, "notes": self._notes}

    def _add(self, *functions: Any) -> None:
        if self._profiler is None:
            self._functions += functions
            return
        from tenure.profiler import ProfilerUsageError

        for function in functions:
            try:
                self._profiler.add_function(function)
            except ProfilerUsageError as error:
                self._notes.append(f"--lines: {error}")


def _functions_of(code: CodeType, name: str) -> list[CodeType]:
    """Return the code of all functions of a name; only exact matches, if there are any."""
    found, to_do = list[CodeType](), [code]
    while to_do:
        inner = [each for each in to_do.pop().co_consts if isinstance(each, CodeType)]
        to_do += inner
        found += (each for each in inner if each.co_flags & 2)  # CO_NEWLOCALS: no class body
    in_full = [each for each in found if each.co_qualname == name]
    return in_full or [each for each in found if each.co_qualname.endswith(f".{name}")]


def _as_function(code: CodeType) -> FunctionType:
    """Return a function of this code that is never called: a profiler takes functions."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    function = FunctionType(code, {"__name__": MAIN}, code.co_name, None, cells)
    function.__qualname__ = code.co_qualname
    return function
