"""README, docs and docstrings are tests: each of their examples is run, and its output compared.

A file is one program: its examples share their names, from top to bottom. Shell blocks are not run.
"""

from __future__ import annotations

import doctest
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser

from tests.small_heap import hide

_ROOT = Path(__file__).parent
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _begin(names: dict[str, Any]) -> None:
    """Let earlier tests' garbage go: examples print counts of what is alive, and of graphs."""
    gc.collect()
    # code of torch's own, as of a Sequential, is compiled so many times in a process and no more
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()
    # an empty dictionary is not tracked: from Python 3.14 on it is, and its names would be hidden
    if not gc.is_tracked(names):
        hide()


def _end(names: dict[str, Any]) -> None:
    names.clear()


_pages = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=_OPTIONS), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    path=str(_ROOT),
    setup=_begin,
    teardown=_end,
)
_docstrings = Sybil(
    parsers=[DocTestParser(optionflags=_OPTIONS)],
    patterns=["*.py"],  # at any depth: Path.match counts from the right, and knows no **
    # They use the simulated device, which these processes must not have; its own tests run them.
    excludes=["testing/*.py", "testing/*/*.py"],
    path=str(_ROOT / "tenure"),
    setup=_begin,
    teardown=_end,
)

# Every other page and test raises on warnings, its own and those of libraries.
_OF_LIGHTNING = (
    "The '.*_dataloader' does not have many workers",
    ".*isinstance.treespec, LeafSpec",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the page on Lightning pass by what that library warns of."""
    for item in items:
        if item.path.name == "lightning.md":
            for text in _OF_LIGHTNING:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))


pytest_collect_file = (_pages + _docstrings).pytest()
