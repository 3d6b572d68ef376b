"""Read every object that the garbage collector tracks."""

import gc
import sys
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import compress
from time import monotonic, sleep
from typing import Any

# A module of Python 3.12 that shows its list of free objects, too. To be shown them brings them to
# life; as they die again they enter the list a second time, and from then on it has no end.
# Source: https://github.com/python/cpython/blob/3.12/Modules/_asynciomodule.c, module_traverse
_ENDLESS = "_asyncio" if sys.version_info[:2] == (3, 12) else ""

_MOST_WAIT_S = 5.0
_heaps: list[weakref.ref[list[Any]]] = []
"""The lists of all objects that are still in use, on any thread."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep garbage and finalizers where they are, so that the same heap gives the same answer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Heap(list[Any]):
    """A list of all objects that, unlike a plain one, can have a weak reference."""

    __slots__ = ("__weakref__",)


def wait_for_readers() -> bool:
    """Wait until no thread has a list of all objects any more.

    Such a list holds every object, so nobody can tell meanwhile whether anything else does.

    Returns:
        Whether there was such a list, and now is none.
    """
    has_waited, deadline_s = False, monotonic() + _MOST_WAIT_S
    while any(heap() is not None for heap in list(_heaps)):
        if monotonic() >= deadline_s:
            return False
        # let the other thread run
        sleep(0.001)
        has_waited = True
    return has_waited


def tracked_objects() -> list[Any]:
    """Return every object that the collector tracks, in its order; ``gc.freeze`` is undone."""
    # the collector shows nothing that is frozen
    gc.unfreeze()
    found = _Heap(gc.get_objects())
    _heaps.append(weakref.ref(found, _heaps.remove))
    if (endless := sys.modules.get(_ENDLESS)) is not None:
        for position in [i for i, each in enumerate(found) if each is endless]:
            del found[position]
    return found


def subclasses_of(*bases: type) -> Iterator[type]:
    """Yield some classes and all that inherit from them."""
    for base in bases:
        yield base
        # past a metaclass
        inner: list[type] = type.__subclasses__(base)
        yield from subclasses_of(*inner)


def of_classes(objects: list[Any], classes: Container[int]) -> Iterator[Any]:
    """Yield the objects whose class is among these identities; no object is asked."""
    # by identity, as a metaclass may define __hash__ and __eq__; and all in C, as there are many
    return compress(objects, map(classes.__contains__, map(id, map(type, objects))))


def instances(objects: list[Any], *bases: type) -> list[Any]:
    """Return the instances of some classes, in their order."""
    return list(of_classes(objects, frozenset(map(id, subclasses_of(*bases)))))
