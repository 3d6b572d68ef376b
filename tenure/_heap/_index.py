"""Find the objects that refer to another one, for a search that asks again and again.

What the variables of running functions lead to is looked at first, as holders are mostly there: an
index of a heap of a million objects takes longer than one of some thousand. What is found there is
the whole answer only if it accounts for every reference.
"""

import gc
import sys
import types
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ._reading import variables_of_stack

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
# objects that are read together, and told apart only if one of them refers to what is asked for
_CHUNK = 32
# objects lie at multiples of 16 bytes; what is left tells nearly all of them apart
_ALIGNMENT_BITS = 4
_N_BUCKETS = 1 << 16
# past a __getattribute__ of a metaclass
_DICT_OFFSET = vars(type)["__dictoffset__"].__get__


class Index:
    """Every reference from some objects.

    Args:
        objects: the objects, held until the index is closed: ``in`` says which. No other list or
            variable may refer to them that does not do so later: it would live on among them.
        read: what tells to what some objects refer.
    """

    def __init__(
        self, objects: list[Any], read: Callable[..., list[Any]] = gc.get_referents
    ) -> None:
        self.objects = objects
        self._read = read
        self._ordered = _Identities(objects).ordered()
        held: list[Any] = []
        self._ends: list[int] = []
        for start in range(0, len(objects), _CHUNK):
            held += read(*objects[start : start + _CHUNK])
            self._ends.append(len(held))
        self._held = _Identities(held)
        # of dictionaries of instances that were made since: the chunk of the instance
        self._made_since: dict[int, int] = {}

    def close(self) -> None:
        """Let everything go that was held."""
        self.objects.clear()

    def __contains__(self, candidate: object) -> bool:
        position = bisect_left(self._ordered, id(candidate))
        is_known = position < len(self._ordered) and self._ordered[position] == id(candidate)
        return is_known and bool(self.objects)

    def of(self, asked: Iterable[int]) -> list[object]:
        """Return what refers to any of these identities, in the order of the objects."""
        wanted = frozenset(asked)
        chunks = {bisect_right(self._ends, position) for position in self._held.where(wanted)}
        chunks.update(self._made_since[key] for key in wanted & self._made_since.keys())
        return [found for chunk in sorted(chunks) for found in self._holders(chunk, wanted)]

    def _holders(self, chunk: int, wanted: frozenset[int]) -> Iterator[object]:
        for holder in self.objects[chunk * _CHUNK : (chunk + 1) * _CHUNK]:
            held = self._read(holder)
            if not wanted.isdisjoint(map(id, held)):
                yield holder
            # the dictionary of an instance, which Python makes when it is first read
            for attributes in held if _DICT_OFFSET(type(holder)) else ():
                if type(attributes) is dict and attributes not in self:
                    self._made_since[id(attributes)] = chunk
                    if not wanted.isdisjoint(map(id, gc.get_referents(attributes))):
                        yield attributes


class _Identities:
    """The identities of many objects, read with NumPy if it is loaded; it is never imported."""

    def __init__(self, objects: list[Any]) -> None:
        numbers = map(id, objects)
        self._numpy = _numpy()
        if self._numpy is None:
            self._numbers: Any = list(numbers)
        else:
            self._numbers = self._numpy.fromiter(numbers, self._numpy.int64, len(objects))
            # small numbers, as they are all that most comparisons read
            self._buckets = self._bucket(self._numbers)

    def ordered(self) -> Sequence[int]:
        """Return the identities by size."""
        if self._numpy is None:
            return sorted(self._numbers)
        # an array would make an object of NumPy's for each number that is compared
        return memoryview(self._numpy.sort(self._numbers))

    def where(self, wanted: frozenset[int]) -> list[int]:
        """Return the positions of the objects that are wanted."""
        if self._numpy is None:
            return [i for i, number in enumerate(self._numbers) if number in wanted]
        numbers = self._numpy.fromiter(wanted, self._numpy.int64, len(wanted))
        is_near = self._numpy.zeros(_N_BUCKETS, bool)
        is_near[self._bucket(numbers)] = True
        near = self._numpy.flatnonzero(is_near[self._buckets])
        found: list[int] = near[self._numpy.isin(self._numbers[near], numbers)].tolist()
        return found

    def _bucket(self, numbers: Any) -> Any:
        # the low 16 bits
        return (numbers >> _ALIGNMENT_BITS).astype(self._numpy.uint16)


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    # an import that is under way in another thread shows a module without its names
    return numpy if hasattr(numpy, "isin") else None


def near_objects() -> list[object]:
    """Return what the variables of this thread lead to, the nearest first."""
    near: list[object] = []
    seen: set[int] = set()
    # the list grows while it is read
    for held in chain([variables_of_stack(sys._getframe())], map(gc.get_referents, near)):
        for candidate in held if len(held) <= _MAX_ITEMS else ():
            if len(near) >= _MAX_OBJECTS:
                return near
            if id(candidate) not in seen and gc.is_tracked(candidate) and _is_near(candidate):
                seen.add(id(candidate))
                near.append(candidate)
    return near


def _is_near(candidate: Any) -> bool:
    cls = type(candidate)
    sized = next((base for base in _SIZED if issubclass(cls, base)), None)
    is_small = sized is None or sized.__len__(candidate) <= _MAX_ITEMS
    return is_small and not issubclass(cls, _FAR)
