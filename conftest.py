"""README, docs and docstrings are tests: each of their examples is run, and its output compared.

A file is one program: its examples share their names, from top to bottom. Shell blocks are not run.
A block that begins with ``# train.py`` runs as the file of that name: reports then say its lines.
"""

from __future__ import annotations

import doctest
import gc
import linecache
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser

from tests.small_heap import hide

_ROOT = Path(__file__).parent


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


class _Files(PythonEvaluator):
    """Runs blocks, those with a name in their first line as files of that name."""

    def __call__(self, example: Example) -> None:
        source = example.parsed
        named = re.match(r"# (\w+\.py)\n", source)
        if named is None:
            return super().__call__(example)
        name = named[1]
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec", dont_inherit=True), example.namespace)


# what a page prints is what a reader sees: there is no ellipsis for what varies
_blocks = PythonCodeBlockParser(doctest_optionflags=doctest.NORMALIZE_WHITESPACE)
_blocks.codeblock_parser = PythonCodeBlockParser.codeblock_parser_class("python", _Files())
_pages = Sybil(
    parsers=[_blocks, SkipParser()],
    patterns=["README.md", "docs/*.md"],
    path=str(_ROOT),
    setup=_begin,
    teardown=_end,
)
_docstrings = Sybil(
    parsers=[DocTestParser(optionflags=doctest.NORMALIZE_WHITESPACE)],
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
