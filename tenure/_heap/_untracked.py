"""Holders that the collector does not track: NumPy arrays, and the named results of torch.

Both are found from what holds them. Without NumPy in the process there are no arrays to look for,
and it is never imported here.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import compress
from types import FrameType
from typing import Any

from ._collector import tracked_objects
from ._frames import read_locals
from ._static import class_attributes
from ._steps import Step
from ._tensors import storage_key

SHARES = Step("", "numpy", anchor="numpy array", link=" ", shares=True)


class Untracked:
    """What the frames of all threads and the objects of the collector refer to, of a few types.

    Attributes:
        arrays: the arrays whose memory belongs to a tensor, held strongly while this object lives.
        tuples: tuples that C code made with named fields, such as ``x.max(0)``; held as well.
    """

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.tuples: list[tuple[object, ...]] = []
        self._by_storage: defaultdict[int, list[int]] = defaultdict(list)
        numpy = sys.modules.get("numpy")
        array = None if numpy is None else numpy.ndarray
        # by identity: a metaclass may define __hash__ and __eq__
        kinds = {id(cls) for cls in type.__subclasses__(tuple) if _has_named_fields(cls)}
        for found in _held({*kinds, id(array)}):
            if type(found) is array:
                self._add_array(found)
            elif not gc.is_tracked(found):
                self.tuples.append(found)
        self._ids = frozenset(map(id, (*self.arrays, *self.tuples)))

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
            found |= {id(v): v for _, v in read_locals(frame) if id(type(v)) in kinds}
            frame = frame.f_back
    # one call for all objects, and no Python in the loop over what they refer to
    held = gc.get_referents(*tracked_objects())
    for value in compress(held, map(kinds.__contains__, map(id, map(type, held)))):
        found[id(value)] = value
    return found.values()
