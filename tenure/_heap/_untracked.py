"""Holders that the collector does not track: NumPy arrays, and the named results of torch.

All are found from what holds them, the dictionaries and tuples too that the collector has let go
because nothing that it tracks is in them. Without NumPy in the process there are no arrays to look
for, and it is never imported here.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import compress, filterfalse
from types import FrameType
from typing import Any

from ._collector import tracked_objects
from ._frames import read_locals
from ._static import class_attributes
from ._steps import Step
from ._tensors import storage_key

# by identity, as for all types here
_CONTAINERS = frozenset(map(id, (dict, tuple)))
# containers whose references are looked at together
_CHUNK = 512
SHARES = Step("", "numpy", anchor="numpy array", link=" ", shares=True)


class Untracked:
    """What the frames of all threads and the objects of the collector refer to, of a few types.

    Attributes:
        arrays: the arrays whose memory belongs to a tensor, held strongly while this object lives.
        holders: tuples that C code made with named fields, such as ``x.max(0)``; and dictionaries
            and tuples around those or around arrays. They are held as well.
    """

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.holders: list[object] = []
        self._by_storage: defaultdict[int, list[int]] = defaultdict(list)
        numpy = sys.modules.get("numpy")
        array = None if numpy is None else numpy.ndarray
        # by identity: a metaclass may define __hash__ and __eq__
        kinds = {id(cls) for cls in type.__subclasses__(tuple) if _has_named_fields(cls)}
        for found in _held({*kinds, id(array)}):
            if type(found) is array:
                self._add_array(found)
            elif not gc.is_tracked(found):
                self.holders.append(found)
        self._ids = frozenset(map(id, (*self.arrays, *self.holders)))

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._ids

    def arrays_of(self, key: int | None) -> list[Any]:
        """The arrays over one storage, in the order in which they were found."""
        return [self.arrays[i] for i in self._by_storage.get(key, ())] if key is not None else []

    def _add_array(self, array: Any) -> None:
        owner = array.base
        while type(owner) is type(array):
            owner = owner.base
        key = storage_key(owner)
        if key is not None:
            self._by_storage[key].append(len(self.arrays))
            self.arrays.append(array)


def _has_named_fields(cls: type) -> bool:
    return "n_sequence_fields" in class_attributes(cls)


def _held(kinds: set[int]) -> Iterable[Any]:
    found: dict[int, Any] = {}
    frame: FrameType | None
    for frame in sys._current_frames().values():
        # walking on with the same variable: if it kept our own frame, that would be a cycle
        while frame is not None:
            values = [value for _, value in read_locals(frame)]
            _add_kinds(found, values, kinds)
            _add_let_go(found, values, kinds)
            frame = frame.f_back
    # one call for all objects, and no Python in the loop over what they refer to
    untracked = filterfalse(gc.is_tracked, gc.get_referents(*tracked_objects()))
    held = _of_types(list(untracked), kinds | _CONTAINERS)
    _add_kinds(found, held, kinds)
    _add_let_go(found, held, kinds)
    return found.values()


def _add_kinds(found: dict[int, Any], held: list[Any], kinds: set[int]) -> None:
    found.update((id(value), value) for value in _of_types(held, kinds))


def _of_types(held: list[Any], kinds: Collection[int]) -> list[Any]:
    return list(compress(held, map(kinds.__contains__, map(id, map(type, held)))))


def _add_let_go(found: dict[int, Any], held: list[Any], kinds: set[int]) -> None:
    """Add containers that the collector has let go and that have one of these kinds in them."""
    levels = []
    while level := _let_go(held):
        levels.append(level)
        held = gc.get_referents(*level)
        _add_kinds(found, held, kinds)
    for level in reversed(levels):
        for start in range(0, len(level), _CHUNK):
            chunk = level[start : start + _CHUNK]
            if _refer(found, *chunk):
                found.update((id(holder), holder) for holder in chunk if _refer(found, holder))


def _let_go(held: list[Any]) -> list[Any]:
    containers = filterfalse(gc.is_tracked, _of_types(held, _CONTAINERS))
    return list({id(container): container for container in containers}.values())


def _refer(wanted: dict[int, Any], *holders: Any) -> bool:
    return not wanted.keys().isdisjoint(map(id, gc.get_referents(*holders)))
