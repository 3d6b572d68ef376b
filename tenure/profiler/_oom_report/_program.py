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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FrameType

from tenure._callers import is_installed, is_internal, is_standard

# To read more would take seconds: of a large program only the files that run are known.
_MOST_CHARACTERS = 1 << 18
_MOST_OF_SOURCE = 24
_GROWS = frozenset(
    {"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put"}
)
# functions that add to an argument
_GROWING = frozenset({"heappush", "insort"})
# what these give has no graph
_PLAIN = frozenset({"item", "detach", "tolist", "numpy", "data", "cpu"})
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef)
_INDEXED = re.compile(r"(\w+)\[…\]")


class ProgramFiles:
    """The files of a program.

    Args:
        frames: frames of the program that run.

    Attributes:
        carried: names that a statement reads and binds anew, as ``h`` in ``h = cell(x, h)``.
        needed: names that backward passes get graphs from.
        added: what the program adds to a name, as ``loss`` to ``losses`` or ``total``.
    """

    def __init__(self, frames: Iterable[FrameType] = ()) -> None:
        trees, self._is_whole = _read({frame.f_code.co_filename for frame in frames})
        nodes = [node for tree in trees for node in ast.walk(tree)]
        functions = [node for node in nodes if isinstance(node, _DEFINED)]
        growing = _GROWING.union(*map(_growing_names, functions))
        fillers = {f.name for f in functions if _returns_filled(f)}
        self.added: defaultdict[str, list[ast.expr]] = defaultdict(list)
        self.carried: set[str] = set()
        self._known, self._filled = _names(trees), set[str]()
        for name, value, is_bound in (flow for node in nodes for flow in _flows(node)):
            if not is_bound:
                self.added[name].append(value)
            elif isinstance(value, ast.Call) and _name_of(value.func) in fillers:
                self._filled.add(name)
            elif name in _names([value]):
                self.carried.add(name)
        calls = (node for node in nodes if isinstance(node, ast.Call))
        given = _names(arg for call in calls if _name_of(call.func) in growing for arg in call.args)
        self._grown = {*self.added, *self.carried, *self._filled, *given}
        scopes: list[Sequence[ast.AST]] = [[function] for function in functions]
        defined = (*_DEFINED, ast.ClassDef)
        scopes += ([each for each in tree.body if not isinstance(each, defined)] for tree in trees)
        self.needed = {name for scope in scopes for name in _needed(scope)}

    def is_fixed(self, place: str) -> bool:
        """Return whether a place is a data set: the program adds nothing to its containers."""
        names = _INDEXED.findall(place)
        is_known = bool(names) and self._is_whole and self._known.issuperset(names)
        return is_known and self._grown.isdisjoint(names)

    def is_filled(self, place: str) -> bool:
        """Return whether a function returned a container that one inside it fills, as a hook."""
        return not self._filled.isdisjoint(_INDEXED.findall(place))

    def needs(self, place: str) -> str:
        """Return the container at a line whose graphs are run backward; "" if there is none."""
        return next((name for name in _INDEXED.findall(place)[::-1] if name in self.needed), "")

    def added_to(self, place: str) -> str:
        """Return the only value that lines add with its graph, if its code is short; else ""."""
        values = self.added.get(place.partition("[")[0].rpartition(".")[2], [])
        listed = (each.elts if isinstance(each, ast.List) else [each] for each in values)
        found = {ast.unparse(e): e for elements in listed for e in elements if _graph_names(e)}
        # of several, the source does not tell which of them fills the memory
        if len(found) != 1:
            return ""
        ((text, value),) = found.items()
        is_short = isinstance(value, ast.Name | ast.Attribute) and len(text) <= _MOST_OF_SOURCE
        return text if is_short else ""


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


def _bound_in(target: ast.AST) -> set[str]:
    """Return the names that a target binds."""
    found = (n for n in ast.walk(target) if isinstance(getattr(n, "ctx", None), ast.Store))
    return {name for node in found if (name := _name_of(node))}


def _flows(node: ast.AST) -> Iterator[tuple[str, ast.expr, bool]]:
    """Names that a node gives a value: whether it binds them, or adds to them."""
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in _GROWS and node.args:
            # the attribute in which a Queue keeps its items
            yield from ((name, node.args[-1], False) for name in (*_names([func]), "queue"))
        return
    value = getattr(node, "value", None) or getattr(node, "iter", None)
    targets = [*getattr(node, "targets", ()), *filter(None, [getattr(node, "target", None)])]
    # as ``total = total + loss``
    if isinstance(node, ast.AugAssign):
        value = ast.BinOp(node.target, node.op, node.value)
    if not isinstance(value, ast.expr):
        return
    for target in targets:
        for name in _bound_in(target):
            yield name, value, True
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                sides = ((value.left, value.right), (value.right, value.left))
                yield from ((name, b, False) for a, b in sides if name == _name_of(a))
        for each in ast.walk(target):
            if isinstance(each, ast.Subscript):
                yield from ((name, value, False) for name in _names([each.value]))


def _grown_in(function: ast.AST) -> set[str]:
    return {name for node in ast.walk(function) for name, _, bound in _flows(node) if not bound}


def _growing_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the name of a function that adds to one of its arguments."""
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    return {function.name} if _grown_in(function) & (arguments - {"self"}) else set()


def _returns_filled(function: ast.AST) -> bool:
    """Return whether a function returns what one inside it adds to."""
    nodes = list(ast.walk(function))[1:]
    inside = [node for node in nodes if isinstance(node, (*_DEFINED, ast.Lambda))]
    returned = _names(node for node in nodes if isinstance(node, ast.Return))
    return any(not returned.isdisjoint(_grown_in(node)) for node in inside)


def _needed(scope: Sequence[ast.AST]) -> set[str]:
    """Names that the backward passes of a function get graphs from."""
    sources: defaultdict[str, set[str]] = defaultdict(set)
    waiting: list[str] = []
    for node in (node for each in scope for node in ast.walk(each)):
        for name, value, _ in _flows(node):
            sources[name] |= _graph_names(value)
        if isinstance(node, ast.Call) and _name_of(node.func) == "backward":
            waiting += _graph_names(node)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sources[name]
    return found


def _graph_names(node: ast.AST) -> set[str]:
    """Return the names in an expression, but for those that it takes without their graphs."""
    if isinstance(node, ast.Attribute) and node.attr in _PLAIN:
        return set()
    own = {name} if (name := _name_of(node)) else set()
    return own.union(*map(_graph_names, ast.iter_child_nodes(node)))


def is_library(frame: FrameType) -> bool:
    """Return whether the code of a frame is torch's, tenure's, or of an installed library."""
    return is_internal(frame) or _is_of_library(frame.f_code.co_filename)


def _is_of_library(path: str) -> bool:
    return is_standard(path) or is_installed(path)
