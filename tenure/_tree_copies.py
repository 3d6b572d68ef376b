"""Trees of containers with some of their objects replaced.

Invariant: an object has one replacement, however often and from wherever a tree leads to it, also
from within itself; a container that leads to nothing replaced stands for itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor, nn

from tenure._torch.pytree import parts_of

_MAPPINGS = (dict, UserDict)
_SEQUENCES = (list, deque)


def is_mutable(node: object) -> bool:
    """Whether a container can be written to: a mapping, a list, a dataclass that is no module."""
    return isinstance(node, (*_MAPPINGS, *_SEQUENCES)) or _is_dataclass(node)


def entries_of(node: Any) -> dict[Any, Any]:
    """What a container that can be written to holds, by key, by index or by attribute."""
    if isinstance(node, _MAPPINGS):
        return dict(node.items())  # a subclass may show others than it stores
    if isinstance(node, list | deque):
        return dict(enumerate(node))
    names = [each.name for each in dataclasses.fields(node) if hasattr(node, each.name)]
    return {name: getattr(node, name) for name in names} | getattr(node, "__dict__", {})


def set_entries(node: Any, entries: dict[Any, Any]) -> None:
    """Give a container these entries, and no others; those that it has already are not touched."""
    before = entries_of(node)
    if isinstance(node, list | deque):
        others = list(entries.values())
        if len(others) != len(before) or any(map(_is_other, others, node)):
            node.clear()
            node.extend(others)
        return
    is_mapping = isinstance(node, _MAPPINGS)
    for key in [key for key in before if key not in entries]:
        node.__delitem__(key) if is_mapping else object.__delattr__(node, key)
    for key, entry in entries.items():
        if key not in before or before[key] is not entry:
            _set(node, key, entry)


class Survey:
    """All that a tree leads to, each object once.

    Args:
        tree: any object, cyclic or not.
        known: the ids of objects to look no further into.
        is_leaf: says of a container that it is none.

    Attributes:
        nodes: the objects by id, in the order in which a reader meets them.
    """

    def __init__(
        self,
        tree: Any,
        known: Container[int] = (),
        is_leaf: Callable[[object], bool] = lambda node: False,
    ) -> None:
        self._tree = tree
        self.nodes: dict[int, Any] = {}
        self._parts: dict[int, tuple[list[Any], Callable[[list[Any]], Any]]] = {}
        self._parents: defaultdict[int, list[int]] = defaultdict(list)
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            if id(node) in self.nodes:
                continue
            self.nodes[id(node)] = node
            parts = None if id(node) in known or is_leaf(node) else _parts_of(node)
            if parts is not None:
                self._parts[id(node)] = parts  # kept: a container may make its children anew
                for child in parts[0]:
                    self._parents[id(child)].append(id(node))
                waiting += reversed(parts[0])

    def replaced(self, replacements: dict[int, Any]) -> Any:
        """The tree with replaced objects, by id; the copies of containers join replacements."""
        nodes = self.nodes.items()
        changed = {key for key, node in nodes if replacements.get(key, node) is not node}
        waiting = list(changed)
        while waiting:
            above = [key for key in self._parents[waiting.pop()] if key not in changed]
            changed.update(above)
            waiting += above
        return self._replaced(self._tree, replacements, changed)

    def _replaced(self, node: Any, replacements: dict[int, Any], changed: set[int]) -> Any:
        if id(node) not in changed:
            return node
        if id(node) in replacements:
            return replacements[id(node)]
        children, made_of = self._parts[id(node)]
        if not is_mutable(node):
            made = made_of([self._replaced(child, replacements, changed) for child in children])
            return replacements.setdefault(id(node), made)  # a list in it may have led back here
        made = replacements[id(node)] = copy.copy(node)
        for key, child in zip(entries_of(node), children, strict=True):
            other = self._replaced(child, replacements, changed)
            if other is not child:
                _set(made, key, other)
        return made


def _parts_of(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a container, and what makes one like it of others if it can't be written."""
    if is_mutable(node):
        return list(entries_of(node).values()), type(node)
    if isinstance(node, tuple):
        kind: Any = type(node)
        is_named = hasattr(kind, "_fields")
        return list(node), lambda others: kind(*others) if is_named else kind(others)
    return parts_of(node)


def _set(node: Any, key: Any, entry: Any) -> None:
    if isinstance(node, (*_MAPPINGS, *_SEQUENCES)):
        node[key] = entry
    else:
        object.__setattr__(node, key, entry)  # a frozen dataclass refuses its own


def _is_dataclass(node: object) -> bool:
    return (
        dataclasses.is_dataclass(node)
        and not isinstance(node, type | tuple | Tensor | nn.Module)
        and parts_of(node) is None
    )


def _is_other(one: object, other: object) -> bool:
    return one is not other
