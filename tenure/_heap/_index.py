"""Who refers to an object, for a search that asks again and again.

The first questions are passes of the collector, which compares each reference in the heap with each
object asked for. A search that goes on, or asks for many, makes an index of the heap once and is
answered from it.
"""

import gc
import operator
import sys
from bisect import bisect_left
from collections.abc import Iterator

from ._collector import has_frozen, tracked_objects
from ._counts import OF_VARIABLE
from ._fast_locals import take_out_emptied
from ._identities import Identities, IdentitySet, References

# the collector's own pass is faster for a few objects, and an index costs as much as some passes
_MAX_ASKED = 48
_MAX_PASSES = 7
# objects whose references are asked for together, and of these, those that are told apart
_BLOCK = 65_536
_CHUNK = 32
# past a __getattribute__ of a metaclass
_DICT_OFFSET = vars(type)["__dictoffset__"].__get__


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
        return [
            found
            for found in gc.get_referrers(*asked)
            if found is not asked and not _is_leftover(found, asked)
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


def _is_leftover(found: object, asked: list[object]) -> bool:
    """Whether this is the tuple of a call's arguments, which Python 3.13 finds itself.

    It is over by now, and held by nobody but the answer.
    """
    if type(found) is not tuple or len(found) != len(asked):
        return False
    # the answer, the loop over it, and this function's variable
    is_held = sys.getrefcount(found) > 2 + OF_VARIABLE
    return not is_held and all(map(operator.is_, found, asked))


def _refer(wanted: frozenset[int], *holders: object) -> bool:
    return not wanted.isdisjoint(map(id, gc.get_referents(*holders)))
