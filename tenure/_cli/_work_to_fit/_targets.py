"""Functions that the command line names, as ``train.py:setup`` or ``package.train:setup``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tenure._errors import CommandError


def load_function(target: str) -> Callable[[], Any]:
    """Import what ``MODULE:FUNCTION`` names.

    Args:
        target: MODULE is a dotted name, looked for in the current directory first, or the path of a
            file, whose folder is then importable as that of a script is; FUNCTION may have dots.

    Raises:
        CommandError: there is no such thing, or it can't be called.
    """
    module_name, _, function_name = target.rpartition(":")
    if not module_name or not function_name:
        raise CommandError(
            f"{target!r} names no function. Write MODULE:FUNCTION, as train.py:setup."
        )
    is_file = module_name.endswith(".py") or os.sep in module_name
    found: Any = _load_file(module_name) if is_file else _load_module(module_name)
    for name in function_name.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise CommandError(f"{module_name} has no function {function_name!r}. Is it defined there?")
    needed = _needed_arguments(found)
    if needed:
        raise CommandError(
            f"{target} wants {', '.join(needed)}, and is called without arguments. Name a function "
            "that makes everything itself, or give these defaults."
        )
    return found  # type: ignore[no-any-return]  # what it returns is looked at by whoever calls it


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # of C
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


def _load_module(name: str) -> ModuleType:
    _put_first(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # one that it imports is missing: the traceback says more
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise
        raise CommandError(
            f"There is no module {name!r}. It is looked for in this directory and among installed "
            "packages; a file can be given by its path, as src/train.py:setup."
        ) from None


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise CommandError(f"There is no file {path!r}. Give the path of a Python file.")
    _put_first(os.getcwd())
    _put_first(os.path.dirname(os.path.abspath(path)))
    # not `__main__`: what stands below `if __name__ == "__main__":` is the program's own work
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(
            f"{path!r} is no file that Python can import. Give one that ends in .py."
        )
    module = importlib.util.module_from_spec(spec)
    # before it runs, as an import does: dataclasses and pickles look their module up
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _put_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
