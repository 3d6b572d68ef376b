"""NumPy arrays that share the memory of tensors; the collector does not track arrays.

Without NumPy in the process there is nothing to look for, and it is never imported here.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
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
            for candidate in _untracked():
                if type(candidate) is numpy.ndarray:
                    self._add(candidate)

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


def _untracked() -> Iterator[object]:
    """What the frames of all threads and the objects of the collector refer to."""
    for frame in sys._current_frames().values():
        while frame is not None:
            yield from (value for _, value in read_locals(frame))
            frame = frame.f_back  # type: ignore[assignment]
    for holder in gc.get_objects():
        yield from gc.get_referents(holder)
