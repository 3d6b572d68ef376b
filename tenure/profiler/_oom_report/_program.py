"""What the program does with its variables, read from its source; nothing of it runs.

A name is that of a variable or an attribute, without the object that has the attribute. Of code
without source nothing is known: all its containers may grow.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType

from tenure._callers import is_internal

# To read more would take seconds: of a large program only the files that run are known.
_MOST_CHARACTERS = 1 << 18
_GROWS = frozenset(
    {"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put"}
)
# functions that add to an argument
_GROWING = frozenset({"heappush", "insort"})
_PARTS_OF_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = os.path.dirname(os.__file__)
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef)
_INDEXED = re.compile(r"(\w+)\[…\]")


class ProgramFiles:
    """The files of a program.

    Args:
        frames: frames of the program that run.

    Attributes:
        carried: names that a statement reads and binds anew, as ``h`` in ``h = cell(x, h)``.
    """

    def __init__(self, frames: Iterable[FrameType] = ()) -> None:
        trees, self._is_whole = _read({frame.f_code.co_filename for frame in frames})
        nodes = [node for tree in trees for node in ast.walk(tree)]
        functions = [node for node in nodes if isinstance(node, _DEFINED)]
        growing = _GROWING.union(f.name for f in functions if _grows_an_argument(f))
        fillers = {f.name for f in functions if _returns_filled(f)}
        self._known = _names(trees)
        self.carried, self._filled = set[str](), set[str]()
        self._grown = _grown_in(nodes)
        for node in nodes:
            if isinstance(node, ast.Call) and _name_of(node.func) in growing:
                self._grown |= _names(node.args)
            for name, value in _bindings(node):
                if isinstance(value, ast.Call) and _name_of(value.func) in fillers:
                    self._filled.add(name)
                elif name in _names([value]):
                    self.carried.add(name)
        self._grown |= self.carried | self._filled

    def is_fixed(self, place: str) -> bool:
        """Return whether a place is a data set: the program adds nothing to its containers."""
        names = _INDEXED.findall(place)
        is_known = bool(names) and self._is_whole and self._known.issuperset(names)
        return is_known and self._grown.isdisjoint(names)

    def is_filled(self, place: str) -> bool:
        """Return whether a function returned a container that one inside it fills, as a hook."""
        return not self._filled.isdisjoint(_INDEXED.findall(place))


def _read(paths: set[str]) -> tuple[list[ast.Module], bool]:
    """Return the files of the program, ``paths`` first, and whether all were read."""
    if not paths:
        return [], False
    n_characters, is_whole, trees = 0, True, []
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    found = [*paths, *(path for path in modules if type(path) is str and path.endswith(".py"))]
    for path in dict.fromkeys(found):
        if _is_of_library(path) or (path.startswith(_OURS) and path not in paths):
            continue
        source = "".join(linecache.getlines(path))
        n_characters += len(source)
        # a module may name a file that is none
        if n_characters <= _MOST_CHARACTERS and (source or path not in paths):
            with suppress(SyntaxError, ValueError):
                trees.append(ast.parse(source))
                continue
        is_whole = False
    return trees, is_whole


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return all names in some nodes and below."""
    found = (each for node in nodes for each in ast.walk(node))
    return {name for each in found if (name := _name_of(each))}


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "arg", None) or ""


def _targets_of(node: ast.AST) -> list[ast.AST]:
    return [*getattr(node, "targets", ()), *filter(None, [getattr(node, "target", None)])]


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that a node binds, each with what it binds them to."""
    value = getattr(node, "value", None) or getattr(node, "iter", None)
    # as ``total = total + loss``
    if isinstance(node, ast.AugAssign):
        value = ast.BinOp(node.target, node.op, node.value)
    if isinstance(value, ast.expr):
        for each in (each for target in _targets_of(node) for each in ast.walk(target)):
            if isinstance(getattr(each, "ctx", None), ast.Store) and (name := _name_of(each)):
                yield name, value


def _grown_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the containers that some nodes add to."""
    grown = set[str]()
    for node in nodes:
        if isinstance(node, ast.Call):
            func = node.func
            if isinstance(func, ast.Attribute) and func.attr in _GROWS and node.args:
                # the attribute in which a Queue keeps its items
                grown |= {*_names([func]), "queue"}
        else:
            inside = (each for target in _targets_of(node) for each in ast.walk(target))
            grown |= _names(each.value for each in inside if isinstance(each, ast.Subscript))
    return grown


def _grows_an_argument(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    return not _grown_in(ast.walk(function)).isdisjoint(arguments - {"self"})


def _returns_filled(function: ast.AST) -> bool:
    """Return whether a function returns what one inside it adds to."""
    nodes = list(ast.walk(function))[1:]
    inside = [node for node in nodes if isinstance(node, (*_DEFINED, ast.Lambda))]
    returned = _names(node for node in nodes if isinstance(node, ast.Return))
    return any(not returned.isdisjoint(_grown_in(ast.walk(node))) for node in inside)


def is_library(frame: FrameType) -> bool:
    """Return whether the code of a frame is torch's, tenure's, or of an installed library."""
    return is_internal(frame) or _is_of_library(frame.f_code.co_filename)


def _is_of_library(path: str) -> bool:
    return path.startswith(_STANDARD) or any(part in path for part in _PARTS_OF_LIBRARIES)
