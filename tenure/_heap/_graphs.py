"""The nodes of autograd, and every tensor that they keep, through C++ and through Python alike.

Nodes are read through ``_raw_saved_*`` and never through ``_saved_*``, so no unpack hook runs and
no checkpoint is recomputed. What a node keeps in Python (attributes of a custom Function's context,
hooks, what a pack hook returned, the arguments of a checkpoint) is followed as long as the graph
alone holds it: an object is entered only when every reference to it was met on the way.

Source: ``torch/csrc/autograd/saved_variable.h`` for what a saved tensor holds.
"""

import gc
import sys
import types
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tenure._storages import storage_key
from tenure._torch.autograd import content_of_saved, is_saved_tensor
from tenure._torch.counting import SOLE

from ._reading import class_attributes, cpp_references, is_kind, mro_of, read, type_name
from ._slots import slots_of
from ._words import Namer

# references to an object from its entry, and from the variable that is asked about
_OWN_REFERENCES = 1 + SOLE
_EDGES = "next_functions"
_RAW = "_raw_saved_"
_MAX_DEPTH = 2


def is_node(found: object) -> bool:
    """Return whether an object is a node of a graph."""
    return any(_EDGES in class_attributes(base) for base in mro_of(type(found)))


def node_classes() -> list[type]:
    """Return the classes that all classes of nodes inherit from, or are."""
    # each operation has one of its own, which torch makes when the first of its nodes is read
    direct: list[type] = type.__subclasses__(object)
    return [cls for cls in direct if _EDGES in class_attributes(cls)]


def walk_nodes(stack: list[Any], seen: dict[int, Any]) -> Iterator[Any]:
    """Yield every node once; `seen` keeps them, so that no identity is used again."""
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            yield node
            stack.extend(reversed(inner_nodes(node)))


def inner_nodes(node: Any) -> list[Any]:
    """Return the nodes that a backward pass runs next."""
    return [inner for inner, _ in node.next_functions if inner is not None]


def _slot_names(cls: type) -> list[str]:
    """Return the attributes under which a class of nodes shows what it has saved."""
    names = (name for base in mro_of(cls) for name in class_attributes(base))
    return [name for name in names if name.startswith(_RAW) or name == "variable"]


def _slots_of_node(node: Any, names: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """Labels of what a node has saved, with a tensor or what a hook packed, and its unpack hook."""
    for name in names:
        try:
            saved = getattr(node, name)
        # freed by backward()
        except RuntimeError:
            continue
        for item in _items_in(saved):
            packed, unpack = content_of_saved(item) if is_saved_tensor(item) else (item, None)
            yield name.removeprefix(_RAW), packed, unpack


def _items_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    if type(value) in (tuple, list) and depth:
        for item in value:
            yield from _items_in(item, depth - 1)
    else:
        yield value


@dataclass(slots=True)
class Referent:
    """One object that the graph refers to.

    Attributes:
        found: the object.
        places: where, as ``AddmmBackward0.mat1`` or ``MyFunctionBackward.stash['k']``.
        namer: how to spell the next step from there, as an attribute from a dictionary of them.
        references: how many references from Python were met.
        is_packed: an unpack hook stands between it and the backward pass.
        hidden: references that only C++ can have, and shows to nobody.
        n_saved: how often C++ has it, as nodes do that saved it.
        is_held: something other than the graph holds it too; known once all was followed.
        root: which of the roots leads to it, by its place among them; of several the first.
    """

    found: Any
    places: list[str] = field(default_factory=list)
    namer: Namer | None = None
    references: int = 0
    is_packed: bool = False
    hidden: int = 0
    n_saved: int = 0
    is_held: bool = False
    root: int = 0


class Saved(NamedTuple):
    """A tensor that a node has saved, by identity while the graphs are walked.

    Attributes:
        tensor: the tensor.
        base: what it is a view of; None for no view.
        key: its storage.
        node: the node.
        name: the class of the node.
        label: what the node calls the tensor.
        root: the root that leads to the node, by its place among them.
    """

    tensor: int
    base: int | None
    key: int | None
    node: int
    name: str
    label: str
    root: int


class Graphs:
    """What the graphs below some nodes keep; the tensors are held while this object lives.

    Args:
        roots: the nodes to begin with.
        beside: what else of ours has one reference to some objects.
        follow: whether objects in Python are followed, and not only what C++ holds.

    Attributes:
        tensors: the entries of the tensors, in the order in which they were met.
        saved: what nodes have saved, in the order of the walk.
        nodes: all nodes, by identity.
        roots_of_nodes: for each node the place of the root that leads to it.
    """

    def __init__(
        self, roots: Iterable[Any], *, beside: Container[object] = (), follow: bool = True
    ) -> None:
        self.nodes: dict[int, Any] = {}
        self.roots_of_nodes: dict[int, int] = {}
        self.saved: list[Saved] = []
        self._beside = beside
        self._follows = follow
        # by the identity of a class of nodes
        self._names: dict[int, list[str]] = {}
        self._kept: dict[int, Referent] = {}
        self._entered: set[int] = set()
        self._waiting: dict[int, Referent] = {}
        # the place of the root from which the walk goes on
        self._root = 0
        nodes = [(i, node) for i, node in enumerate(roots) if node is not None]
        # Objects in Python can lead to nodes (a checkpoint's arguments have graphs), and these to
        # objects again, until neither finds anything new.
        while nodes:
            self._add_nodes(nodes)
            nodes = self._enter_owned() if follow else []
        entries = self._kept.values()
        self.tensors = [entry for entry in entries if is_kind(type(entry.found), Tensor)]
        # Only now: a reference that was not met yet would look like somebody else's.
        for entry in self.tensors:
            entry.is_held = self._has_unknown_references(entry)

    def _add_nodes(self, nodes: list[tuple[int, Any]]) -> None:
        # One root after the other: what several lead to is the first one's.
        for self._root, root in nodes:
            for node in walk_nodes([root], self.nodes):
                self.roots_of_nodes[id(node)] = self._root
                self._add_node(node)

    def _has_unknown_references(self, entry: Referent) -> bool:
        """Return whether there are references that were not met on the way."""
        found = entry.found
        known = entry.references + entry.hidden + cpp_references(found) + (found in self._beside)
        return sys.getrefcount(found) > known + _OWN_REFERENCES

    def _add_node(self, node: Any) -> None:
        cls, name = type(node), type_name(type(node))
        if id(cls) not in self._names:
            self._names[id(cls)] = _slot_names(cls)
        for label, data, unpack_hook in _slots_of_node(node, self._names[id(cls)]):
            self._add_data(f"{name}.{label}", data, unpack_hook)
            for t in _items_in(data):
                if is_kind(type(t), Tensor):
                    base = read(t, "_base")
                    of_base = None if base is None else id(base)
                    saved = Saved(id(t), of_base, storage_key(t), id(node), name, label, self._root)
                    self.saved.append(saved)
        # A custom Function's node is its context: what the user put on it is an attribute in
        # Python.
        if self._follows:
            self._meet_referents(node, name, None, is_packed=False)

    def _add_data(self, place: str, data: Any, unpack_hook: Any) -> None:
        if unpack_hook is not None:
            self._meet(unpack_hook, place, is_packed=True)
            self._meet(data, place, is_packed=True)
        elif is_kind(type(data), Tensor):
            self._enter(data, place).n_saved += 1

    def _enter(self, found: Any, place: str) -> Referent:
        entry = self._kept.get(id(found))
        # The entry holds the object, so that its identity stays its own meanwhile.
        if entry is None:
            entry = Referent(found, root=self._root)
            self._kept[id(found)] = self._waiting[id(found)] = entry
        if place not in entry.places:
            entry.places.append(place)
        return entry

    def _meet(
        self, found: Any, place: str, namer: Namer | None = None, *, is_packed: bool = False
    ) -> None:
        """Note one reference from Python."""
        # Classes are held by their modules anyway, and lead everywhere.
        if is_kind(type(found), type) or found is None:
            return
        entry = self._enter(found, place)
        entry.namer = entry.namer or namer
        entry.references += 1
        entry.is_packed |= is_packed
        # Looked at again with each reference that is met: the last one may be what was missing.
        if id(found) not in self._entered:
            self._waiting[id(found)] = entry

    def _enter_owned(self) -> list[tuple[int, Any]]:
        """Follow what only the graph holds; the nodes that this leads to are given back."""
        nodes: list[tuple[int, Any]] = []
        while self._waiting:
            _, entry = self._waiting.popitem()
            self._root = entry.root
            if is_saved_tensor(entry.found):
                self._entered.add(id(entry.found))
                self._add_data(entry.places[0], *content_of_saved(entry.found))
            elif is_node(entry.found):
                if id(entry.found) not in self.nodes:
                    nodes.append((entry.root, entry.found))
            elif not self._has_unknown_references(entry):
                self._entered.add(id(entry.found))
                self._meet_referents(
                    entry.found, entry.places[0], entry.namer, is_packed=entry.is_packed
                )
        return nodes

    def _meet_referents(
        self, holder: Any, place: str, namer: Namer | None, *, is_packed: bool
    ) -> None:
        # a function of its own, so that its variables count for no reference later
        referents = {id(held): held for held in gc.get_referents(holder)}
        # as of most nodes, which have no Python side
        if not referents:
            return
        for key, step in slots_of(holder, referents):
            held = referents[key]
            text, following = ("", None) if is_packed else step.spelled(namer)
            self._meet(held, place + text, following, is_packed=is_packed)
            if is_packed and type(held) is types.CellType:
                # beside an unpack hook, C++ keeps the pack hook, which shares its variables
                self._kept[id(held)].hidden = 1
