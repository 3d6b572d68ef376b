"""Containers: one level of any, and trees of them with some of their objects replaced.

Invariant: an object has one replacement, however often and from wherever a tree leads to it; a
container that leads to nothing replaced stands for itself.

Some read containers by themselves: budgets ask at each operation for the lists, tuples and
dictionaries that torch passes, and nothing else (``storages_in``); and what must not run code of a
user's class reads by the methods of the builtin ones (notes of containers in ``adaptive``, names in
reports of memory, the search of the heap).
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tenure._errors import TenureError
from tenure._torch.pytree import is_registered, parts_of

# Not every Mapping: copies of others may share what they hold.
_MAPPINGS = (dict, UserDict)
_SEQUENCES = (list, deque)
_UNSET = object()
SINGLE = frozenset(map(id, (int, float, complex, bool, str, bytes, type(None))))
"""The ids of types of which no instance holds another object: not every type has a hash."""


class Level(NamedTuple):
    """One level of a container that can be made again.

    Attributes:
        keys: the keys, indices or names of fields.
        children: what stands there.
        make: makes a container like it of other children.
    """

    keys: list[Any]
    children: list[Any]
    make: Callable[[list[Any]], Any]


def level_of(node: Any, *, is_all: bool = False) -> Level | None:
    """Return one level of a container, or None if the container can't be rebuilt.

    Args:
        node: the container, or any other object.
        is_all: whether attributes of a dataclass beside its fields count as well.
    """
    if isinstance(node, tuple):
        return Level(list(range(len(node))), list(node), partial(_tuple_like, type(node)))
    # what a class has registered is what it wants to be taken apart into, its fields or not
    if not is_mutable(node):
        parts = parts_of(node)
        return None if parts is None else Level([*range(len(parts[0]))], *parts)
    entries = entries_of(node) if is_all or not is_record(node) else _fields_of(node)
    return Level(list(entries), list(entries.values()), partial(_filled, node, list(entries)))


def contents_of(node: Any) -> list[Any]:
    """Return the items of one level, also of containers that can't be rebuilt."""
    if isinstance(node, (tuple, set, frozenset, *_SEQUENCES)):
        return list(node)
    # Mapping asks for the hash of a type, and a metaclass may have none
    if type(type(node)).__hash__ is not None and isinstance(node, Mapping):
        return list(node.values())
    # all fields, though its class be registered: a flatten function may leave some out
    if is_record(node):
        return list(_fields_of(node).values())
    parts = parts_of(node)
    return [] if parts is None else parts[0]


def tensors_in(
    values: Iterable[Any], below: Callable[[Any], list[Any]] | None = None
) -> list[Tensor]:
    """Return the tensors in containers of any kind each once, in order.

    Args:
        values: what to search, cyclic or not.
        below: what an object holds, also of a tensor; by default that of containers alone.
    """
    found: list[Tensor] = []
    # kept: what a container makes anew must not die on the way, or its id could recur
    seen: dict[int, Any] = {}
    waiting = [*values][::-1]
    while waiting:
        value = waiting.pop()
        if id(type(value)) in SINGLE or id(value) in seen:
            continue
        seen[id(value)] = value
        # isinstance would run the code of a class that lies about itself
        if issubclass(type(value), Tensor):
            found.append(value)
            if below is None:
                continue
        waiting += (below or contents_of)(value)[::-1]
    return found


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the same containers, of what a function makes of each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    level = level_of(tree)
    if level is None or not level.children:
        return tree
    return level.make([mapped(function, child) for child in level.children])


def is_record(node: object) -> bool:
    """Return whether it is a dataclass that is no class, tensor, module, tuple or mapping."""
    return dataclasses.is_dataclass(node) and not isinstance(
        node, (type, tuple, Tensor, nn.Module, *_MAPPINGS)
    )


def is_mutable(node: object) -> bool:
    """Return whether a container can be written to: a mapping, a list, a dataclass."""
    if isinstance(node, (*_MAPPINGS, *_SEQUENCES)):
        return True
    return is_record(node) and not is_registered(node)


def entries_of(node: Any) -> dict[Any, Any]:
    """Return the entries of a writable container, by key, by index or by attribute."""
    if isinstance(node, _MAPPINGS):
        return dict(node.items())
    if isinstance(node, _SEQUENCES):
        return dict(enumerate(node))
    # with what was set beside the fields: a forward may keep its results there
    return _fields_of(node) | getattr(node, "__dict__", {})


def set_entries(node: Any, entries: dict[Any, Any]) -> None:
    """Give a container these entries, and no others; those that it has already are not touched."""
    before = entries_of(node)
    if isinstance(node, _SEQUENCES):
        others = list(entries.values())
        # as a whole: what was removed or put in between has moved all that follows
        if len(others) != len(before) or any(map(operator.is_not, others, node)):
            node.clear()
            node.extend(others)
        return
    is_mapping = isinstance(node, _MAPPINGS)
    for key in [key for key in before if key not in entries]:
        node.__delitem__(key) if is_mapping else object.__delattr__(node, key)
    for key, entry in entries.items():
        if key not in before or before[key] is not entry:
            _set(node, key, entry)


def passed_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors that a function is called with or returns, as often as they are there.

    One by one, because behind one may stand half-made objects: ``copy.deepcopy`` for one passes its
    memo along, with all that it has copied so far.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from passed_tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from passed_tensors(each)


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
        # kept: a container may make its children anew, whose ids would then be others'
        self._levels: dict[int, Level] = {}
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            if id(node) in self.nodes:
                continue
            self.nodes[id(node)] = node
            if id(node) in known or is_leaf(node) or (level := level_of(node, is_all=True)) is None:
                continue
            self._levels[id(node)] = level
            waiting += reversed(level.children)

    def replaced(self, replacements: dict[int, Any]) -> Any:
        """Return the tree with replaced objects, by id; the copies of containers join replacements.

        Raises:
            TenureError: a container holds itself, so it can't be made again.
        """
        return self._replaced(self._tree, replacements, {})

    def _replaced(self, node: Any, replacements: dict[int, Any], seen: dict[int, bool]) -> Any:
        """Do as above; ``seen`` notes whether a container was met again within itself."""
        level, key = self._levels.get(id(node)), id(node)
        if key in replacements:
            return replacements[key]
        if level is None or key in seen:
            seen[key] = True
            return node
        seen[key] = False
        children = [self._replaced(child, replacements, seen) for child in level.children]
        if all(map(operator.is_, children, level.children)):
            return node
        if seen[key]:
            raise TenureError(
                f"A {type(node).__name__} holds itself, so it can't be copied with its tensors on "
                "another device. Pass them in a container that does not."
            )
        return replacements.setdefault(key, level.make(children))


def _fields_of(node: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that have a value."""
    names = [each.name for each in dataclasses.fields(node)]
    found = {name: getattr(node, name, _UNSET) for name in names}
    return {name: value for name, value in found.items() if value is not _UNSET}


def _tuple_like(kind: Any, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _filled(node: Any, keys: list[Any], items: list[Any]) -> Any:
    made = _copied(node)
    for key, item in zip(keys, items, strict=True):
        _set(made, key, item)
    return made


def _copied(node: Any) -> Any:
    made = copy.copy(node)
    # its items are its attributes, as in many a class of settings: a copy has those of its own
    if getattr(node, "__dict__", None) is node:
        made.__dict__ = made
    return made


def _set(node: Any, key: Any, entry: Any) -> None:
    if isinstance(node, (*_MAPPINGS, *_SEQUENCES)):
        node[key] = entry
    else:
        # a frozen dataclass refuses its own
        object.__setattr__(node, key, entry)
