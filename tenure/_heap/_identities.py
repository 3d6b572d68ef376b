"""The identities of many objects at once, and which of them are wanted.

A search through a heap of a million objects compares some million identities again and again, and
making a number object of each costs more than all else. So they are read from the memory of a list
as one array of NumPy. Without NumPy in the process (it is never imported here) an `array` of the
standard library holds the same numbers, and the answers are the same.

Source: https://github.com/python/cpython/blob/3.11/Include/cpython/listobject.h, `ob_item`.
"""

import ctypes
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

# a list ends with the address of its items and the room that they have
_N_BYTES = ctypes.sizeof(ctypes.c_void_p)
_ITEMS = list.__basicsize__ - 2 * _N_BYTES
# objects lie at multiples of 16 bytes; what is left tells nearly all of them apart
_ALIGNMENT_BITS = 4
_N_BUCKETS = 1 << 16


class IdentitySet:
    """Some identities to look for.

    Args:
        identities: the identities, few or many.
    """

    def __init__(self, identities: Iterable[int]) -> None:
        self.identities = frozenset(identities)
        self._numbers: Any = None
        self._buckets: Any = None

    def among(self, numpy: Any, numbers: Any, buckets: Any) -> Any:
        """The positions in an array of NumPy at which one of them stands.

        Args:
            numpy: the module.
            numbers: the array.
            buckets: the bucket of each number; most are told apart by it.
        """
        if self._buckets is None:
            self._numbers = numpy.fromiter(self.identities, numpy.int64, count=len(self.identities))
            self._buckets = numpy.zeros(_N_BUCKETS, bool)
            self._buckets[_bucket(self._numbers)] = True
        near = numpy.flatnonzero(self._buckets.take(buckets, mode="clip"))
        return near[numpy.isin(numbers[near], self._numbers)] if len(near) else near


class Identities:
    """The identities of the objects of a list, in its order; no object is held.

    Args:
        objects: the list.
    """

    def __init__(self, objects: list[Any]) -> None:
        self._numpy = _numpy()
        self.numbers: Any = (
            array("Q", map(id, objects))
            if self._numpy is None
            else _read_items(self._numpy, objects)
        )
        # small numbers, as they are all that most comparisons read
        self._buckets: Any = (
            None if self._numpy is None else _bucket(self.numbers).astype(self._numpy.uint16)
        )

    def where(self, wanted: IdentitySet) -> Sequence[int]:
        """The positions of the objects that are wanted."""
        if self._numpy is None:
            hits = map(wanted.identities.__contains__, self.numbers)
            return [position for position, is_hit in enumerate(hits) if is_hit]
        found: list[int] = wanted.among(self._numpy, self.numbers, self._buckets).tolist()
        return found

    def first_positions(self) -> list[int]:
        """For each identity one position at which it stands."""
        if self._numpy is None:
            return list(dict(zip(self.numbers, range(len(self.numbers)), strict=True)).values())
        last = self._numpy.zeros(_N_BUCKETS, self._numpy.int64)
        last[self._buckets] = self._numpy.arange(len(self.numbers))
        unique = self._numpy.unique(self.numbers)
        positions = last[_bucket(unique)]
        # those that share their bucket, all at once: a look through the whole array costs the more
        others = self.numbers[positions] != unique
        if others.any():
            wanted = IdentitySet(unique[others].tolist())
            near = wanted.among(self._numpy, self.numbers, self._buckets)
            _, first = self._numpy.unique(self.numbers[near], return_index=True)
            positions[others] = near[first]
        found: list[int] = positions.tolist()
        return found

    def ordered(self) -> Sequence[int]:
        """The identities by size."""
        if self._numpy is None:
            return array("Q", sorted(self.numbers))
        ordered: Sequence[int] = self._numpy.sort(self.numbers)
        return ordered


class References:
    """What some holders refer to, by identity.

    Args:
        referents: for each holder what it refers to.
    """

    def __init__(self, referents: Iterable[list[Any]]) -> None:
        held: list[Any] = []
        self._ends: list[int] = []
        for of_holder in referents:
            held += of_holder
            self._ends.append(len(held))
        self._identities = Identities(held)

    def holders_of(self, wanted: IdentitySet) -> list[int]:
        """The numbers of the holders that refer to something wanted."""
        positions = self._identities.where(wanted)
        return sorted({bisect_right(self._ends, position) for position in positions})


def _bucket(numbers: Any) -> Any:
    return (numbers >> _ALIGNMENT_BITS) & (_N_BUCKETS - 1)


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    # an import that is under way in another thread shows a module without its names
    return numpy if _IS_READABLE and hasattr(numpy, "isin") else None


def _read_items(numpy: Any, objects: list[Any]) -> Any:
    return numpy.frombuffer(_items_of(objects), numpy.int64)


def _items_of(objects: list[Any]) -> bytes:
    """The addresses of the items of a list, which nobody changes meanwhile."""
    if not objects:
        return b""
    address = ctypes.c_void_p.from_address(id(objects) + _ITEMS).value or 0
    # a copy by one call; an array of ctypes would leave its type as garbage
    return ctypes.string_at(address, len(objects) * _N_BYTES)


def _is_readable() -> bool:
    if sys.implementation.name != "cpython" or array("q").itemsize != _N_BYTES:
        return False
    probe = [object(), object()]
    return _items_of(probe) == array("q", map(id, probe)).tobytes()


_IS_READABLE = _is_readable()
