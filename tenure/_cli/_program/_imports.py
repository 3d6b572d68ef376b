"""To be told when a module is imported: of its code before it runs, and of its end."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any


class Imports(importlib.abc.MetaPathFinder):
    """Finds nothing itself; looks at what the finders after it have found.

    Args:
        on_code: for the full names of modules, what is told their code before each is run.
        on_done: for the full names of modules, what is called once each was imported.
    """

    def __init__(
        self,
        on_code: dict[str, Callable[[str, CodeType], None]],
        on_done: dict[str, Callable[[], None]],
    ) -> None:
        self._on_code = on_code
        self._on_done = on_done

    def begin(self) -> None:
        """Look from now on; what was imported already is told at once."""
        for name in [name for name in self._on_done if name in sys.modules]:
            self._on_done.pop(name)()
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Look no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the others find, told to those who wait for it."""
        if fullname not in self._on_code and fullname not in self._on_done:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)):
                # of a loader in C, or without a place for attributes, nothing is told
                if hasattr(spec.loader, "__dict__"):
                    self._tell(fullname, spec.loader)
                return spec
        return None

    def _tell(self, fullname: str, loader: Any) -> None:
        theirs = loader.exec_module
        on_code, on_done = self._on_code.get(fullname), self._on_done.get(fullname)
        get_code: Any = getattr(loader, "get_code", None)

        def code_of(name: str) -> Any:
            # both imports and runpy ask the loader for it
            del loader.get_code
            code = get_code(name)
            if on_code is not None and code is not None:
                on_code(fullname, code)
            return code

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            theirs(module)
            if on_done is not None:
                # else other threads that import it, as those that we start, would wait for us
                module.__spec__._initializing = False  # type: ignore[union-attr]
                on_done()

        loader.exec_module = exec_module
        if on_code is not None and get_code is not None:
            loader.get_code = code_of
