"""``--lines``: the figures of each line of some functions.

A function is known by its code, which is found when its module is compiled: so its first call is
seen, whoever makes it.
"""

from __future__ import annotations

import sys
import types
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from ._measuring import MAIN, Found

if TYPE_CHECKING:
    from tenure.profiler import LineProfiler


class Lines:
    """The functions that are asked for, each measured from when it is found.

    Args:
        asked: as ``"module:qualname"``, or without a module a name in the program itself.
        main_names: what else the program's own module is called.
    """

    def __init__(self, asked: list[str], main_names: tuple[str, ...]) -> None:
        self._wanted: dict[str, dict[str, bool]] = {}
        for each in asked:
            module, _, name = each.rpartition(":")
            home = MAIN if not module or module in main_names else module
            self._wanted.setdefault(home, {})[name] = False
        self._main_names = main_names
        self._waiting: list[Any] = []
        self._notes: list[str] = []
        self._profiler: LineProfiler | None = None

    @property
    def modules(self) -> list[str]:
        """The modules whose imports are watched."""
        return [*self._wanted, *(self._main_names if MAIN in self._wanted else ())]

    def on_code(self, module: str, code: CodeType) -> None:
        """Find the functions in the code of a module that is about to run."""
        home = MAIN if module in self._main_names else module
        for name in self._wanted.get(home, ()):
            for found in _functions_of(code, name):
                self._wanted[home][name] = True
                self._add(_as_function(found, home))

    def on_module(self, module: str) -> None:
        """Find those that a module has from elsewhere, once it was imported."""
        for name, is_found in self._wanted.get(module, {}).items():
            value: Any = None if is_found else sys.modules.get(module)
            for part in name.split("."):
                value = getattr(value, part, None)
            if value is not None:
                self._wanted[module][name] = True
                self._add(value)

    def measured(self, notes: list[str]) -> Found:
        """Measure them from now on."""
        from tenure.profiler import LineProfiler

        self._notes = notes
        self._profiler = LineProfiler()
        waiting, self._waiting = self._waiting, []
        for function in waiting:
            self._add(function)
        with self._profiler:
            yield
        yield
        for module, names in self._wanted.items():
            where = "the program" if module == MAIN else module
            missing = [name for name, is_found in names.items() if not is_found]
            notes += [f"--lines {name}: {where} has no such function" for name in missing]
        return {"lines": self._profiler.display() if self._profiler.functions else None}

    def _add(self, function: Any) -> None:
        if self._profiler is None:
            self._waiting.append(function)
            return
        from tenure.profiler import ProfilerUsageError

        try:
            self._profiler.add_function(function)
        except ProfilerUsageError as error:
            self._notes.append(f"--lines: {error}")


def _functions_of(code: CodeType, name: str) -> list[CodeType]:
    """The code of functions of a name, however deep; those that are called so in full, if any."""
    found, to_do = list[CodeType](), [code]
    while to_do:
        inner = [each for each in to_do.pop().co_consts if isinstance(each, CodeType)]
        to_do += inner
        found += (each for each in inner if each.co_flags & 2)  # CO_NEWLOCALS: no class body
    in_full = [each for each in found if each.co_qualname == name]
    return in_full or [each for each in found if each.co_qualname.endswith(f".{name}")]


def _as_function(code: CodeType, module: str) -> FunctionType:
    """A function of this code that is never called: a profiler takes functions."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    function = FunctionType(code, {"__name__": module}, code.co_name, None, cells)
    function.__qualname__ = code.co_qualname
    return function
