"""To be told when a module is imported: of its code before it runs, and of its end.

No frame of ours is on the stack while the module runs, and the module, its loader and its spec are
as they would be.
"""

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
        spec = self._others(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        if told := self._on_code.get(fullname):
            _tell_code(spec.loader, fullname, told)
        if done := self._on_done.get(fullname):
            _tell_end(spec, done)
        return spec

    def _others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            found: ModuleSpec | None = find(fullname, path, target) if find else None
            if found is not None:
                return found
        return None


def _tell_code(loader: Any, fullname: str, told: Callable[[str, CodeType], None]) -> None:
    """Look at the next code that a loader gives; both imports and ``runpy`` ask it for that."""
    original = getattr(loader, "get_code", None)
    if original is None:
        return

    def get_code(*args: Any, **kwargs: Any) -> Any:
        vars(loader).pop("get_code", None)
        code = original(*args, **kwargs)
        if isinstance(code, CodeType):
            told(fullname, code)
        return code

    # of a loader in C, or without a place for attributes, nothing is told
    if hasattr(loader, "__dict__"):
        loader.get_code = get_code


class _ToldSpec(ModuleSpec):
    """A spec whose import is about to end.

    ``importlib`` says so by an attribute that it sets before and after, and by nothing else that
    needs no frame below the module's.

    Source: ``_load_unlocked`` in ``Lib/importlib/_bootstrap.py``.
    """

    _told: Callable[[], None]

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, begins: bool) -> None:
        vars(self)["_initializing"] = begins
        if not begins and "_told" in vars(self):
            told = vars(self).pop("_told")
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # what it was
            # where it has failed it is there no more
            if self.name in sys.modules:
                told()


def _tell_end(spec: ModuleSpec, done: Callable[[], None]) -> None:
    # one of a class of its own has reasons for it
    if type(spec) is ModuleSpec:
        spec.__class__ = _ToldSpec
        vars(spec)["_told"] = done
