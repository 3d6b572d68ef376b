"""Watch modules as they are imported: their code before it runs, and the end of the import."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any


class Imports(importlib.abc.MetaPathFinder):
    """Finds nothing itself, but watches what the finders after it have found.

    Args:
        names: the full names of the modules.
        on_code: is called with a name and the code, before the code is run.
        on_done: is called with a name, once the module was imported.
    """

    def __init__(
        self,
        names: set[str],
        on_code: Callable[[str, CodeType], None],
        on_done: Callable[[str], None],
    ) -> None:
        self._names, self._on_code, self._on_done = names, on_code, on_done

    def begin(self) -> None:
        """Watch from now on; what was imported already is done at once."""
        for name in [name for name in self._names if name in sys.modules]:
            self._on_done(name)
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Watch no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the others find, with a loader that is watched."""
        others = [each for each in sys.meta_path if each is not self]
        for finder in others if fullname in self._names else ():
            if spec := finder.find_spec(fullname, path, target):
                # a loader in C, or without room for attributes, can't be watched
                if hasattr(spec.loader, "__dict__"):
                    self._watch(fullname, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        theirs, get_code = loader.exec_module, getattr(loader, "get_code", lambda name: None)

        def code_of(fullname: str) -> Any:
            # both imports and runpy ask the loader for it
            del loader.get_code
            code = get_code(fullname)
            if code is not None:
                self._on_code(name, code)
            return code

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            theirs(module)
            # else other threads that import it, as those that we start, would wait for us
            module.__spec__._initializing = False  # type: ignore[union-attr]
            self._on_done(name)

        loader.exec_module, loader.get_code = exec_module, code_of
