"""Files of a program that have the name of a module that tenure imports, such as ``json.py``.

The program imports its own file, as under Python, and tenure imports the module that it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_BESIDES = frozenset({"psutil", "rich", "typing_extensions"})
# Python has imported these before it knows the program, so that its own are never imported.
_AT_START = frozenset(
    {
        "_collections_abc", "_sitebuiltins", "abc", "builtins", "codecs", "encodings",
        "genericpath", "importlib", "io", "ntpath", "os", "posixpath", "site", "stat", "sys",
        "zipimport",
    }
)  # fmt: skip


class _OwnModules:
    """The modules of the same names, ours and theirs; of most programs none."""

    def __init__(self) -> None:
        self._folder = ""
        self._names: frozenset[str] = frozenset()
        self._ours: dict[str, ModuleType] = {}

    def give_to(self, folder: str) -> None:
        """Let a program import what stands in its folder, whatever tenure has imported."""
        try:
            files = {*os.listdir(folder or os.curdir)}
        except OSError:
            return
        taken = {name.partition(".")[0] for name in files} & (sys.stdlib_module_names | _BESIDES)
        taken -= _AT_START.union(sys.builtin_module_names)
        self._folder = folder
        self._names = frozenset(each for each in taken if _is_module(folder, each, files))
        self._ours = self._taken()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """A block in which tenure imports its own."""
        if not self._names:
            yield
            return
        theirs, path = self._taken(), sys.path[:]
        sys.modules.update(self._ours)
        sys.path[:] = [each for each in path if each != self._folder]
        try:
            yield
        finally:
            sys.path[:] = path
            self._ours = self._taken()
            sys.modules.update(theirs)

    def _taken(self) -> dict[str, ModuleType]:
        """The modules that are imported under these names, and are no longer."""
        names = [name for name in sys.modules if name.partition(".")[0] in self._names]
        return {name: sys.modules.pop(name) for name in names}


def _is_module(folder: str, name: str, files: set[str]) -> bool:
    # a folder without that file gives way to a module of Python
    return f"{name}.py" in files or os.path.exists(os.path.join(folder, name, "__init__.py"))


own_modules = _OwnModules()
