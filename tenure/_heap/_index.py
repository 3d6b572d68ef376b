"""Who refers to an object, for a search that asks again and again: what is near, then the heap.

What the variables of running functions lead to is looked at first, as holders are mostly there: a
pass over a heap of a million objects takes longer than a look at some thousand. What is found there
is the whole answer only where it accounts for every reference.

The first questions to the heap are passes of the collector, which compares each reference in it
with each object asked for. A search that goes on, or asks for many, makes an index of the heap once
and is answered from it.
"""

import gc
import operator
import sys
import types
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tenure._callers import is_tenure

from ._collector import has_frozen, is_endless, tracked_objects
from ._identities import Identities, IdentitySet, References
from ._reading import is_kind, read_locals, references_beside, take_out_emptied

# of what is near
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
# the collector's own pass is faster for a few objects, and an index costs as much as some passes
_MAX_ASKED = 48
_MAX_PASSES = 7
# objects whose references are asked for together, and of these, those that are told apart
_BLOCK = 65_536
_CHUNK = 32
# past a __getattribute__ of a metaclass
_DICT_OFFSET = vars(type)["__dictoffset__"].__get__


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


class Referrers:
    """The objects of one moment that refer to others.

    Until it is closed it holds every object that it has in its index: ``in`` says which.
    """

    def __init__(self) -> None:
        self._n_passes = 0
        self._index: _Index | None = None

    def get_ready(self, n_asked: int) -> None:
        """Make the index, if a question for so many objects is worth it.

        To be called while no list or variable refers to these objects that will not do so later:
        it would live on in the index.
        """
        is_pass_enough = n_asked <= _MAX_ASKED and self._n_passes < _MAX_PASSES
        if self._index is None and (has_frozen() or not is_pass_enough):
            self._index = _Index(tracked_objects())
        self._n_passes += 1

    def of(self, asked: list[object]) -> list[object]:
        """The objects that refer to any of those asked for, in the collector's order."""
        if self._index is not None:
            return self._index.referrers_of(asked)
        answer = gc.get_referrers(*asked)
        others = references_beside(answer)
        return [
            found
            for found, n_others in zip(answer, others, strict=True)
            if found is not asked
            and not (n_others == 0 and _are_arguments(found, asked))
            and not is_endless(found)
        ]

    def close(self) -> None:
        """Let everything go that was held; this object is among it."""
        if self._index is not None:
            self._index.close()

    def __contains__(self, candidate: object) -> bool:
        return self._index is not None and candidate in self._index


class _Index:
    """Every reference from an object that the collector tracks.

    Args:
        heap: what may refer to something. The emptied dictionaries in which frames have shown their
            variables are taken out: who reads one of these counts its references.
    """

    def __init__(self, heap: list[object]) -> None:
        self._heap = heap
        take_out_emptied(heap)
        self._ordered = Identities(heap).ordered()
        self._blocks = [
            References(self._referents(start)) for start in range(0, len(self._heap), _BLOCK)
        ]
        # of dictionaries of instances that were made since: where the instance is
        self._made_since: dict[int, int] = {}

    def close(self) -> None:
        self._heap.clear()

    def __contains__(self, candidate: object) -> bool:
        position = bisect_left(self._ordered, id(candidate))
        is_known = position < len(self._ordered) and self._ordered[position] == id(candidate)
        return bool(is_known and self._heap)

    def referrers_of(self, asked: list[object]) -> list[object]:
        """The objects that refer to any of those asked for, in the order of the heap."""
        wanted = IdentitySet(map(id, asked))
        starts = {
            number * _BLOCK + chunk * _CHUNK
            for number, block in enumerate(self._blocks)
            for chunk in block.holders_of(wanted)
        }
        for identity in wanted.identities & self._made_since.keys():
            starts.add(self._made_since[identity])
        return [
            found for start in sorted(starts) for found in self._holders(start, wanted.identities)
        ]

    def _referents(self, start: int) -> Iterator[list[object]]:
        """What the chunks of one block refer to."""
        for chunk in range(start, min(start + _BLOCK, len(self._heap)), _CHUNK):
            yield gc.get_referents(*self._heap[chunk : chunk + _CHUNK])

    def _holders(self, start: int, wanted: frozenset[int]) -> Iterator[object]:
        for holder in self._heap[start : start + _CHUNK]:
            if _refer(wanted, holder):
                yield holder
            for attributes in self._attributes_made_since(holder):
                self._made_since.setdefault(id(attributes), start)
                if _refer(wanted, attributes):
                    yield attributes

    def _attributes_made_since(self, holder: object) -> list[object]:
        """The dictionary of an instance, which Python makes when it is first read."""
        if not _DICT_OFFSET(type(holder)):
            return []
        return [o for o in gc.get_referents(holder) if type(o) is dict and o not in self]


def _are_arguments(found: object, asked: list[object]) -> bool:
    """Whether this is a tuple of exactly the objects that the collector was asked about.

    Python 3.13 finds the tuple of the arguments of that very call. The call is over, so only the
    answer holds it.
    """
    is_alike = type(found) is tuple and len(found) == len(asked)
    return is_alike and all(map(operator.is_, found, asked))  # type: ignore[call-overload]


def _refer(wanted: frozenset[int], *holders: object) -> bool:
    return not wanted.isdisjoint(map(id, gc.get_referents(*holders)))


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
