"""Holders that the collector does not show: those in C++, NumPy arrays, named results of torch.

Only C++ knows that a tensor has a view, a gradient, or what autograd saved. Arrays and named
results are found from what holds them, the dictionaries and tuples too that the collector has let
go because nothing that it tracks is in them.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import filterfalse
from types import FrameType
from typing import Any, NamedTuple

import torch

from tenure._storages import storage_key

from ._array_slots import array_class, holds_objects, is_array, referents_of
from ._collector import live_tensors, tracked_objects
from ._identities import Identities, IdentitySet, References
from ._index import Referrers
from ._nodes import below, saved_tensors, walk_nodes
from ._reading import (
    class_attributes,
    cpp_references,
    gradient_of,
    read,
    read_locals,
    references_beside,
    spans_storage,
    type_name,
)
from ._words import Step

_VIEW = Step("", "view", anchor="a view", link=" in ")
_WHOLE_VIEW = _VIEW._replace(whole=True)
_GRADIENT = Step(".grad", "attribute")

_CONTAINERS = (dict, tuple)
# objects whose references are looked at together
_CHUNK = 16_384
SHARES = Step("", "numpy", anchor="numpy array", link=" ", shares=True)


class Reference(NamedTuple):
    """One reference, by the number of the live tensor whose life it shares."""

    owner: int
    step: Step


class TensorGraph:
    """Who holds which tensor in C++, for all tensors that are alive now.

    Args:
        referrers: it may hold one reference to a tensor itself.
        live: all tensors with a handle in Python, if they are known already.

    Attributes:
        live: the tensors, held strongly while this object lives.
    """

    def __init__(self, referrers: Referrers, live: list[torch.Tensor] | None = None) -> None:
        self.live = live_tensors() if live is None else live
        counts = references_beside(self.live)
        self._live_ids = frozenset(map(id, self.live))
        # an earlier search may have given a handle to what only autograd has
        self._handed_out = frozenset(
            id(t)
            for t, count in zip(self.live, counts, strict=True)
            if count - (t in referrers) > cpp_references(t)
        )
        self._shared: defaultdict[int, list[int]] | None = None
        self._inner: set[int] = set()
        self._by_id: defaultdict[int, list[Reference]] = defaultdict(list)
        self._by_storage: defaultdict[int, list[Reference]] = defaultdict(list)
        self._add_nodes()
        for owner, t in enumerate(self.live):
            if id(t) not in self._inner:
                self._add_tensor(owner, t)

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._live_ids

    def owners_of(self, held: object) -> Iterator[tuple[object, Step]]:
        """Tensors that hold this tensor or graph node itself, and how."""
        return self._others(held, self._by_id.get(id(held), ()))

    def sharers_of(self, t: torch.Tensor) -> Iterator[tuple[object, Step]]:
        """Tensors whose graph saved the memory of this one under another handle."""
        key = storage_key(t)
        return self._others(t, self._by_storage.get(key, ()) if key is not None else ())

    def handles_over(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The other handles to the memory of a tensor that are no views, its base aside."""
        if self._shared is None:
            self._shared = defaultdict(list)
            for owner, other in enumerate(self.live):
                key = storage_key(other) if id(other) in self._handed_out else None
                if key is not None and read(other, "_base") is None:
                    self._shared[key].append(owner)
        key, base = storage_key(t), read(t, "_base")
        found = (self.live[owner] for owner in self._shared.get(key, ())) if key is not None else ()
        return [other for other in found if other is not t and other is not base]

    def _others(
        self, held: object, references: Iterable[Reference]
    ) -> Iterator[tuple[object, Step]]:
        for owner, step in references:
            if self.live[owner] is not held:
                yield self.live[owner], step

    def _add_tensor(self, owner: int, t: torch.Tensor) -> None:
        base = read(t, "_base")
        if base is not None:
            step = _WHOLE_VIEW if spans_storage(t) else _VIEW
            self._by_id[id(base)].append(Reference(owner, step))
        gradient = gradient_of(t)
        if gradient is not None:
            self._by_id[id(gradient)].append(Reference(owner, _GRADIENT))

    def _add_nodes(self) -> None:
        nodes = [read(t, "grad_fn") for t in self.live]
        inner_ids = below(node for node in nodes if node is not None)
        seen: dict[int, Any] = {}
        # outputs first: a node belongs to the graph of what was computed last
        for inner in (False, True):
            for owner, node in enumerate(nodes):
                if node is not None and (id(node) in inner_ids) is inner:
                    self._add_graph(owner, node, seen)

    def _add_graph(self, owner: int, root: Any, seen: dict[int, Any]) -> None:
        for node in walk_nodes([root], seen):
            name = type_name(type(node))
            step = Step("", "autograd", anchor=name, link=" in the graph of ")
            self._by_id[id(node)].append(Reference(owner, step))
            for label, t in saved_tensors(node):
                anchor = f"{name} (saved {label})"
                self._add_saved(owner, t, step._replace(anchor=anchor))

    def _add_saved(self, owner: int, t: torch.Tensor, step: Step) -> None:
        if id(t) in self._live_ids:
            self._by_id[id(t)].append(Reference(owner, step))
        if id(t) not in self._handed_out:
            # a node keeps its own output under a second handle, to avoid a cycle; and of a view
            # that no variable has, the user knows the base
            self._inner.add(id(t))
            base, key = read(t, "_base"), storage_key(t)
            if base is not None:
                self._by_id[id(base)].append(Reference(owner, step))
            if key is not None:
                self._by_storage[key].append(Reference(owner, step._replace(shares=True)))


# --- arrays and named results


class Untracked:
    """What the frames of all threads and the objects of the collector refer to, of a few types.

    Attributes:
        arrays: the arrays whose memory belongs to a tensor, held strongly while this object lives.
        holders: arrays of objects, and tuples that C code made with named fields, such as
            ``x.max(0)``; and dictionaries and tuples around any of those. They are held as well.
    """

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.holders: list[object] = []
        self._by_storage: defaultdict[int, list[int]] = defaultdict(list)
        for found in _held():
            if _leads_on(found):
                self.holders.append(found)
            else:
                self._add_array(found)
        self._ids = frozenset(map(id, (*self.arrays, *self.holders)))
        self._references = References(map(referents_of, self.holders))

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._ids

    def arrays_of(self, key: int | None) -> list[Any]:
        """The arrays over one storage, in the order in which they were found."""
        return [self.arrays[i] for i in self._by_storage.get(key, ())] if key is not None else []

    def holders_of(self, identities: Iterable[int]) -> list[object]:
        """Those that refer to one of these objects."""
        return [
            self.holders[number] for number in self._references.holders_of(IdentitySet(identities))
        ]

    def _add_array(self, array: Any) -> None:
        owner = array.base
        while is_array(owner):
            owner = owner.base
        key = storage_key(owner)
        if key is not None:
            self._by_storage[key].append(len(self.arrays))
            self.arrays.append(array)


def _held() -> Iterable[Any]:
    """All that is held of the kinds in question, and the containers around it."""
    walk = _Walk()
    frame: FrameType | None
    for frame in sys._current_frames().values():
        # walking on with the same variable: if it kept our own frame, that would be a cycle
        while frame is not None:
            walk.add([value for _, value in read_locals(frame)])
            frame = frame.f_back
    heap = tracked_objects()
    for start in range(0, len(heap), _CHUNK):
        walk.add(gc.get_referents(*heap[start : start + _CHUNK]))
    return walk.found.values()


class _Walk:
    """A walk through what the collector does not show.

    Attributes:
        found: by identity, objects of the kinds in question and containers that lead to them.
    """

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        # while only arrays are in it, the collector does not track it, and it would hold itself
        self._seen: set[int] = {id(self.found)}
        arrays = array_class()
        named = filter(_has_named_fields, type.__subclasses__(tuple))
        # by identity: a metaclass may define __hash__ and __eq__
        self._kinds = IdentitySet(map(id, (*named, *(_with_subclasses(arrays) if arrays else ()))))
        self._containers = IdentitySet(map(id, _CONTAINERS))

    def add(self, held: list[Any]) -> None:
        """Add what some objects lead to that are held by what the collector shows."""
        levels = []
        while held:
            classes = Identities(list(map(type, held)))
            fresh = self._unseen(held[i] for i in classes.where(self._kinds))
            self.found.update((id(found), found) for found in fresh)
            containers = [held[i] for i in classes.where(self._containers)]
            levels.append(self._unseen(filterfalse(gc.is_tracked, containers)))
            held = gc.get_referents(*levels[-1])
            for found in filter(_leads_on, fresh):
                held += referents_of(found)
        for level in reversed(levels):
            leading = References(map(gc.get_referents, level)).holders_of(IdentitySet(self.found))
            self.found.update((id(level[number]), level[number]) for number in leading)

    def _unseen(self, candidates: Iterable[Any]) -> list[Any]:
        new = {id(found): found for found in candidates if id(found) not in self._seen}
        self._seen.update(new)
        return list(new.values())


def _leads_on(found: object) -> bool:
    """Whether an object refers to others: not an array of numbers."""
    return not is_array(found) or holds_objects(found)


def _has_named_fields(cls: type) -> bool:
    return "n_sequence_fields" in class_attributes(cls)


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = type.__subclasses__(cls)
    for inner in subclasses:
        yield from _with_subclasses(inner)
