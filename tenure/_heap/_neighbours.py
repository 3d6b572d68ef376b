"""What the variables of running functions lead to: the part of the heap where holders mostly are.

A pass over a heap of a million objects takes longer than a look at some thousand that are near.
What is found there is the whole answer only where it accounts for every reference.
"""

import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tenure._callers import is_tenure

from ._frames import read_locals
from ._identities import IdentitySet, References
from ._static import is_kind

_MAX_OBJECTS = 4096
# what has more items than this takes longer to read than it is worth
_MAX_ITEMS = 1024
_SIZED = (list, dict, tuple, set, frozenset)
# these lead to a whole module, or to all that inherits from it; or they have a frame, whose
# snapshot of its variables must have no second holder while it is read
_FAR = (
    *(type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)


class Neighbours:
    """Objects near the variables of this thread.

    Attributes:
        objects: the objects, the nearest first, held strongly until this one is closed.
    """

    def __init__(self) -> None:
        self.objects: list[object] = []
        self._ids: set[int] = set()
        # by the identity of a class, whose metaclass may define __hash__ and __eq__
        self._lengths: dict[int, Callable[[Any], int]] = {}
        self._add(_variables())
        self._references = References(self._walk())

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._ids

    def of(self, asked: Iterable[int]) -> list[object]:
        """Those that refer to any of these identities, the nearest first."""
        return [self.objects[i] for i in self._references.holders_of(IdentitySet(asked))]

    def close(self) -> None:
        """Let everything go that was held."""
        self._ids.clear()
        self.objects.clear()

    def _walk(self) -> Iterator[list[object]]:
        # the list grows while it is read
        for holder in self.objects:
            held = gc.get_referents(holder)
            self._add(held)
            yield held

    def _add(self, found: list[object]) -> None:
        for candidate in found if len(found) <= _MAX_ITEMS else ():
            if len(self.objects) >= _MAX_OBJECTS:
                return
            is_new = id(candidate) not in self._ids and gc.is_tracked(candidate)
            if is_new and self._is_near(candidate):
                self._ids.add(id(candidate))
                self.objects.append(candidate)

    def _is_near(self, candidate: object) -> bool:
        cls = type(candidate)
        if id(cls) not in self._lengths:
            self._lengths[id(cls)] = _length_of(cls)
        return self._lengths[id(cls)](candidate) <= _MAX_ITEMS


def _length_of(cls: type) -> Callable[[Any], int]:
    """How to ask instances for their number of items, without their own code."""
    if is_kind(cls, *_FAR):
        return _too_many
    return next((base.__len__ for base in _SIZED if is_kind(cls, base)), _unknown)


def _too_many(found: object) -> int:
    return _MAX_ITEMS + 1


def _unknown(found: object) -> int:
    return 0


def _variables() -> list[object]:
    """The values of the variables of this thread, inner functions first, and their globals."""
    found: list[object] = []
    spaces: list[object] = []
    frame: types.FrameType | None = sys._getframe()
    # walking on with the same variable: if it kept our own frame, that would be a cycle
    while frame is not None:
        if not is_tenure(frame):
            if frame.f_locals is not frame.f_globals:
                found += (value for _, value in read_locals(frame))
            spaces.append(frame.f_globals)
        frame = frame.f_back
    return found + spaces
