"""What the program does with its variables, read from its source; nothing of it runs.

A name is that of a variable or an attribute, without the object that has the attribute. Of code
without source nothing is known: its containers may all grow, and its variables are all needed.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType

from tenure._callers import is_internal

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
_PARTS_OF_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = os.path.dirname(os.__file__)
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_BLOCKS = (ast.stmt, ast.ExceptHandler)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WORD = re.compile(r"\w+")


class Program:
    """The files of a program.

    Args:
        frames: frames of the program that run.

    Attributes:
        is_whole: all of its files were read.
        known: all names in its files.
        grown: names that it adds to.
        filled: those of them that another name fills, as the hook of a function that returned it.
        carried: names that a statement reads and binds anew, as ``h`` in ``h = cell(x, h)``.
        summed: names that a statement adds to, as ``total += loss``.
        ended: names whose ``backward()`` is called.
        needed: names that backward passes get graphs from.
        defaults: arguments whose default is a container, as ``collect.store``.
    """

    def __init__(self, frames: Iterable[FrameType]) -> None:
        self._trees: dict[str, ast.Module] = {}
        self.is_whole = self._read({frame.f_code.co_filename for frame in frames})
        trees = self._trees.values()
        nodes = [node for tree in trees for node in ast.walk(tree)]
        functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
        self.known = _names(nodes)
        growing = {f.name for f in functions if _grows_an_argument(f)} | _GROWING
        self.grown = {name for node in nodes for name in _given(node, growing)}
        flows = [flow for node in nodes for flow in _flows(node)]
        self.carried: set[str] = set()
        self.summed: set[str] = set()
        self._added: defaultdict[str, list[ast.expr]] = defaultdict(list)
        for name, value, is_bound in flows:
            if not is_bound:
                self.grown.add(name)
                self._added[name].append(value)
            elif name in _names([value]):
                self.carried.add(name)
                self._add_sum(name, value)
        fillers = {f.name for f in functions if _returns_filled(f)}
        self.filled = {name for name, value, _ in flows if _calls(value, fillers)}
        self.grown |= self.carried | self.filled
        scopes: list[Sequence[ast.AST]] = [[function] for function in functions]
        own = ([each for each in tree.body if not isinstance(each, _SCOPES)] for tree in trees)
        scopes.extend(own)
        self.ended = _ended(nodes)
        self.needed = {name for scope in scopes for name in _needed(scope)}
        self.defaults = {f"{f.name}.{name}" for f in functions for name in _defaults(f)}

    def is_fixed(self, name: str) -> bool:
        """Whether the program adds nothing to a container."""
        return self.is_whole and name in self.known and name not in self.grown

    def added_to(self, place: str) -> str:
        """What is added at a place that still has its graph, if that is short enough to tell."""
        names = _WORD.findall(place.partition("[")[0])
        found = [
            each for each in self._added.get(names[-1] if names else "", ()) if not _is_plain(each)
        ]
        told = {ast.unparse(each) for each in found if isinstance(each, (ast.Name, ast.Attribute))}
        return next((each for each in sorted(told) if len(each) <= _MOST_OF_SOURCE), "")

    def is_past(self, frame: FrameType, name: str) -> bool:
        """Whether a loop of a frame does not read a variable again before it binds it anew."""
        function = self._node_of(frame.f_code)
        nodes = [] if function is None else list(ast.walk(function))
        line = frame.f_lineno
        loops = [node for node in nodes if isinstance(node, _LOOPS)]
        around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0)]
        inside = [node for node in nodes if isinstance(node, (*_FUNCTIONS, ast.Lambda))]
        if not around or name in _names(node for node in inside if node is not function):
            return False
        events = sorted(event for node in nodes for event in _events(node, name))
        loop = around[-1]
        if any(at > (loop.end_lineno or 0) and not binds for at, binds in events):
            return False
        # from the statement that runs to the end of the loop, and from its start again
        own = [event for event in events if event[0] >= loop.lineno]
        now = max(
            node.lineno for node in nodes if isinstance(node, ast.stmt) and node.lineno <= line
        )
        following = [event for event in own if event[0] >= now] or own
        return bool(following) and following[0][1]

    def _add_sum(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            for one, other in ((value.left, value.right), (value.right, value.left)):
                if name in _targets(one):
                    self.summed.add(name)
                    self._added[name].append(other)

    def _read(self, paths: set[str]) -> bool:
        """Whether all files of the program could be read; those of ``paths`` are the first."""
        n_characters, is_whole = 0, True
        modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        found = [*paths, *(path for path in modules if type(path) is str and path.endswith(".py"))]
        for path in dict.fromkeys(found):
            if is_library_path(path) or (path.startswith(_OURS) and path not in paths):
                continue
            lines = linecache.getlines(path)
            n_characters += sum(map(len, lines))
            # a module may name a file that is none
            if n_characters > _MOST_CHARACTERS or (not lines and path in paths):
                is_whole = False
                continue
            try:
                self._trees[path] = ast.parse("".join(lines))
            except (SyntaxError, ValueError):
                is_whole = False
        return is_whole

    def _node_of(self, code: CodeType) -> ast.AST | None:
        tree = self._trees.get(code.co_filename)
        if tree is None or code.co_name == "<module>":
            return tree
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTIONS) and node.name == code.co_name:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node
        return None


# --- names


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """All names in some nodes and below."""
    found = (each for node in nodes for each in ast.walk(node))
    return {name for each in found if (name := _name_of(each))}


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "arg", None) or ""


def _targets(node: ast.AST) -> Iterator[str]:
    """The names that a target binds."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield _name_of(node)
    elif isinstance(node, (ast.Tuple, ast.List, ast.Starred)):
        for each in ast.iter_child_nodes(node):
            yield from _targets(each)


def _flows(node: ast.AST) -> Iterator[tuple[str, ast.expr, bool]]:
    """Names that a node gives a value: whether it binds them, or adds to them."""
    targets: list[ast.expr] = []
    value: ast.expr | None = None
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        targets, value = [node.target], node.value
    elif isinstance(node, ast.AugAssign):
        # as ``total = total + loss``
        targets, value = [node.target], ast.BinOp(node.target, node.op, node.value)
        if isinstance(node.value, ast.List):
            yield from ((name, node.value.elts[0], False) for name in _targets(node.target))
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        targets, value = [node.target], node.iter
    elif isinstance(node, ast.Call) and _name_of(node.func) in _GROWS and node.args:
        # the attribute in which a Queue keeps its items
        names = _names([node.func]) | ({"queue"} if _name_of(node.func) == "put" else set())
        yield from ((name, node.args[-1], False) for name in names - _GROWS)
    for target in targets:
        if value is None:
            return
        yield from ((name, value, True) for name in _targets(target))
        for each in ast.walk(target):
            if isinstance(each, ast.Subscript):
                yield from ((name, value, False) for name in _names([each.value]))


def _events(node: ast.AST, name: str) -> Iterator[tuple[int, bool]]:
    """The line of a statement whenever its own part has to do with a variable: does it bind it?"""
    if isinstance(node, ast.stmt):
        for child in ast.iter_child_nodes(node):
            for each in () if isinstance(child, _BLOCKS) else ast.walk(child):
                if isinstance(each, ast.Name) and each.id == name:
                    reads = isinstance(each.ctx, ast.Load) or isinstance(node, ast.AugAssign)
                    yield node.lineno, not reads


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) in names


def _given(node: ast.AST, growing: set[str]) -> set[str]:
    """Names that are given to a function that adds to its arguments."""
    return _names(node.args) if isinstance(node, ast.Call) and _calls(node, growing) else set()


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _grown_in(function: ast.AST) -> set[str]:
    return {name for node in ast.walk(function) for name, _, bound in _flows(node) if not bound}


def _grows_an_argument(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    grown = _grown_in(function)
    return any(each.arg in grown and each.arg != "self" for each in _parameters(function))


def _returns_filled(function: ast.AST) -> bool:
    """Whether a function returns what one inside it adds to."""
    nodes = list(ast.walk(function))
    inside = [node for node in nodes[1:] if isinstance(node, (*_FUNCTIONS, ast.Lambda))]
    returned = _names(node for node in nodes if isinstance(node, ast.Return))
    return any(not returned.isdisjoint(_grown_in(node)) for node in inside)


def _defaults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Arguments whose default is a container."""
    last, defaults = _parameters(function)[::-1], function.args
    # those without a default by keyword have None in its place
    found = [*defaults.defaults, *defaults.kw_defaults][::-1]
    for argument, default in zip(last, found, strict=False):
        if isinstance(default, (ast.List, ast.Dict, ast.Set)):
            yield argument.arg


# --- graphs


def _is_plain(value: ast.expr) -> bool:
    """Whether an expression gives something without a graph."""
    func = value.func if isinstance(value, ast.Call) else value
    return isinstance(func, ast.Attribute) and func.attr in _PLAIN


def _ended(nodes: Iterable[ast.AST]) -> set[str]:
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return {
        name
        for func in calls
        if isinstance(func, ast.Attribute) and func.attr == "backward"
        for name in _graph_names(func.value)
    }


def _needed(scope: Sequence[ast.AST]) -> set[str]:
    """Names that the backward passes of a function get graphs from."""
    nodes = [node for each in scope for node in ast.walk(each)]
    sources: defaultdict[str, set[str]] = defaultdict(set)
    for name, value, _ in (flow for node in nodes for flow in _flows(node)):
        sources[name] |= _graph_names(value)
    found: set[str] = set()
    waiting = list(_ended(nodes))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sources[name]
    return found


def _graph_names(node: ast.AST) -> set[str]:
    """The names in an expression, but for those that it takes without their graphs."""
    if isinstance(node, ast.Attribute) and node.attr in _PLAIN:
        return set()
    own = {name} if (name := _name_of(node)) else set()
    return own.union(*map(_graph_names, ast.iter_child_nodes(node)))


# --- whose code it is


def is_library(frame: FrameType) -> bool:
    """Whether the code of a frame is torch's, tenure's, or of an installed library."""
    return is_internal(frame) or is_library_path(frame.f_code.co_filename)


def is_library_path(path: str) -> bool:
    """Whether a file is of Python itself or of an installed library."""
    return path.startswith(_STANDARD) or any(part in path for part in _PARTS_OF_LIBRARIES)
