"""Every tensor that a graph of autograd keeps, through C++ and through Python alike.

No unpack hook runs. What a node keeps in Python (attributes of a custom Function's context, hooks,
what a pack hook returned, the arguments of a checkpoint) is followed as long as the graph alone
holds it: an object is entered only when every reference to it was met on the way.
"""

import gc
import sys
import types
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tenure._storages import storage_key
from tenure._torch.autograd import content_of_saved, is_saved_tensor
from tenure._torch.counting import SOLE

from ._nodes import is_node, slot_names, slots_of_node, tensors_in, walk_nodes
from ._reading import cpp_references, is_kind, read, type_name
from ._slots import slots_of
from ._words import Namer

# references to an object from its entry, and from the variable that is asked about
_OWN_REFERENCES = 1 + SOLE


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
        self._classes: dict[int, tuple[str, list[str]]] = {}
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
        """Whether there are references that were not met on the way."""
        found = entry.found
        known = entry.references + entry.hidden + cpp_references(found) + (found in self._beside)
        return sys.getrefcount(found) > known + _OWN_REFERENCES

    def _add_node(self, node: Any) -> None:
        name, slots = self._described(type(node))
        for label, data, unpack_hook in slots_of_node(node, slots):
            self._add_data(f"{name}.{label}", data, unpack_hook)
            for t in tensors_in(data):
                self._add_saved(t, id(node), name, label)
        # A custom Function's node is its context: what the user put on it is an attribute in
        # Python.
        if self._follows:
            self._meet_referents(node, name, None, is_packed=False)

    def _add_saved(self, t: Tensor, node: int, name: str, label: str) -> None:
        base = read(t, "_base")
        base_id = None if base is None else id(base)
        self.saved.append(Saved(id(t), base_id, storage_key(t), node, name, label, self._root))

    def _described(self, cls: type) -> tuple[str, list[str]]:
        """The name and the slots of a class of nodes, worked out once."""
        found = self._classes.get(id(cls))
        if found is None:
            found = self._classes[id(cls)] = type_name(cls), slot_names(cls)
        return found

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
