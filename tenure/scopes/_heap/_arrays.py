"""NumPy arrays that share the memory of tensors; the collector does not track arrays.

Without NumPy in the process there is nothing to look for, and it is never imported here.
"""

import gc
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

from ._frames import read_locals
from ._steps import Step
from ._tensors import storage_key

SHARES = Step("", "numpy", anchor="numpy array", link=" ")


class SharedArrays:
    """Arrays whose memory belongs to a tensor.

    Attributes:
        found: the arrays, held strongly while this object lives.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._ids: set[int] = set()
        self._by_storage: defaultdict[int, list[int]] = defaultdict(list)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            for array in _held_arrays(numpy.ndarray):
                self._add(array)

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._ids

    def of_storage(self, key: int | None) -> list[Any]:
        """The arrays over one storage, in the order in which they were found."""
        return [self.found[i] for i in self._by_storage.get(key, ())] if key is not None else []

    def _add(self, array: Any) -> None:
        owner = array.base
        while type(owner) is type(array):
            owner = owner.base
        key = storage_key(owner)
        if key is not None and id(array) not in self._ids:
            self._by_storage[key].append(len(self.found))
            self._ids.add(id(array))
            self.found.append(array)


def _held_arrays(kind: type) -> list[Any]:
    """What the frames of all threads and the objects of the collector refer to, of one type."""
    found: list[Any] = []
    frame: FrameType | None
    for frame in sys._current_frames().values():
        # walking on with the same variable: if it kept our own frame, that would be a cycle
        while frame is not None:
            found.extend(value for _, value in read_locals(frame) if type(value) is kind)
            frame = frame.f_back
    # one call for all objects: a loop in Python would take ten times as long
    held = gc.get_referents(*gc.get_objects())
    return [*found, *(value for value in held if type(value) is kind)]
