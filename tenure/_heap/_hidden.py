"""Holders that the collector does not show: NumPy arrays, named results of torch.

They are found from what holds them, the dictionaries and tuples too that the collector does not
track because nothing that it tracks is in them.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import filterfalse
from types import FrameType
from typing import Any

from tenure._storages import storage_key

from ._collector import tracked_objects
from ._identities import Identities, IdentitySet, References
from ._reading import (
    array_class,
    class_attributes,
    holds_objects,
    is_array,
    read_locals,
    referents_of,
)
from ._words import Step

_CONTAINERS = (dict, tuple)
# objects whose references are looked at together
_CHUNK = 16_384
SHARES = Step("", "numpy", anchor="numpy array", link=" ", shares=True)


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
    """Return whether an object refers to others: not an array of numbers."""
    return not is_array(found) or holds_objects(found)


def _has_named_fields(cls: type) -> bool:
    return "n_sequence_fields" in class_attributes(cls)


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = type.__subclasses__(cls)
    for inner in subclasses:
        yield from _with_subclasses(inner)
