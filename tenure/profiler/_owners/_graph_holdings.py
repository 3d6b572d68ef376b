"""Every tensor that a graph of autograd keeps, through C++ and through Python alike.

No unpack hook runs. What a node keeps in Python (attributes of a custom Function's context, hooks,
what a pack hook returned, the arguments of a checkpoint) is followed as long as the graph alone
holds it: an object is entered only when every reference to it was met on the way.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tenure._heap import (
    Namer,
    cpp_references,
    is_kind,
    is_node,
    slot_names,
    slots_of,
    slots_of_node,
    type_name,
    walk_nodes,
)
from tenure._torch.autograd import content_of_saved, is_saved_tensor
from tenure._torch.counting import SOLE

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
        is_held: something other than the graph holds it too; known once all was followed.
        root: which of the roots leads to it, by its place among them; of several the first.
    """

    found: Any
    places: list[str] = field(default_factory=list)
    namer: Namer | None = None
    references: int = 0
    is_packed: bool = False
    hidden: int = 0
    is_held: bool = False
    root: int = 0

    def has_unknown_references(self) -> bool:
        """Whether there are references that were not met on the way."""
        found = self.found
        known = self.references + self.hidden + cpp_references(found) + _OWN_REFERENCES
        return sys.getrefcount(found) > known


class GraphHoldings:
    """What the graphs below some nodes keep; the tensors are held while this object lives.

    Args:
        roots: the nodes to begin with.

    Attributes:
        tensors: the entries of the tensors, in the order in which they were met.
        n_nodes: how many nodes there are.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}
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
            nodes = self._enter_owned()
        self.n_nodes = len(self._seen)
        entries = self._kept.values()
        self.tensors = [entry for entry in entries if is_kind(type(entry.found), Tensor)]
        # Only now: a reference that was not met yet would look like somebody else's.
        for entry in self.tensors:
            entry.is_held = entry.has_unknown_references()

    def _add_nodes(self, nodes: list[tuple[int, Any]]) -> None:
        # One root after the other: what several lead to is the first one's.
        for self._root, root in nodes:
            for node in walk_nodes([root], self._seen):
                self._add_node(node)

    def _add_node(self, node: Any) -> None:
        name, slots = self._described(type(node))
        for label, data, unpack_hook in slots_of_node(node, slots):
            self._add_data(f"{name}.{label}", data, unpack_hook)
        # A custom Function's node is its context: what the user put on it is an attribute in
        # Python.
        self._meet_referents(node, name, None, is_packed=False)

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
            self._enter(data, place)

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
                self._add_data(entry.places[0], *content_of_saved(entry.found))
            elif is_node(entry.found):
                if id(entry.found) not in self._seen:
                    nodes.append((entry.root, entry.found))
            elif not entry.has_unknown_references():
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
