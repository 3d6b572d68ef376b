"""The objects that the garbage collector tracks.

Invariant: none is missing. `gc.freeze` hides objects from every function of `gc`, so whoever needs
all of them unfreezes them first, and does not freeze them again: that would freeze newer ones too.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from types import ModuleType
from typing import Any, TypeVar

import torch

from ._identities import Identities, IdentitySet
from ._reading import is_kind

_T = TypeVar("_T")

# `gc.freeze` hides four thousand objects of the barest interpreter. A few hundred are not its
# doing: the collector of Python 3.12 puts immortal tuples (bases of built-in classes) with them.
_FEWEST_FROZEN = 2000

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


def unfreeze() -> None:
    """Undo `gc.freeze`, if the program called it."""
    if has_frozen():
        gc.unfreeze()


def has_frozen() -> bool:
    """Return whether the functions of `gc` leave objects out."""
    return gc.get_freeze_count() >= _FEWEST_FROZEN


class _Heap(list[Any]):
    """A list of all objects that, unlike a plain one, can have a weak reference."""

    __slots__ = ("__weakref__",)


def wait_for_readers() -> bool:
    """Wait until no thread has a list of all objects any more.

    Such a list holds every object, so nobody can tell meanwhile whether anything else does.

    Returns:
        Whether there was such a list, and now is none.
    """
    if not _is_read():
        return False
    deadline_s = monotonic() + _MOST_WAIT_S
    while _is_read() and monotonic() < deadline_s:
        # let the other thread run
        sleep(0.001)
    return not _is_read()


def _is_read() -> bool:
    return any(heap() is not None for heap in list(_heaps))


def tracked_objects() -> list[Any]:
    """Return every object that the collector tracks, in its order."""
    unfreeze()
    found = _Heap(gc.get_objects())
    _heaps.append(weakref.ref(found, _heaps.remove))
    endless = sys.modules.get(_ENDLESS)
    if endless is not None:
        for position in Identities(found).where(IdentitySet([id(endless)])):
            del found[position]
    return found


def is_endless(found: object) -> bool:
    """Whether nobody may ask what an object refers to; `tracked_objects` leaves it out."""
    return type(found) is ModuleType and found is sys.modules.get(_ENDLESS)


def instances(objects: list[Any], judge: Callable[[type], bool]) -> list[Any]:
    """Those whose class passes."""
    return [found for found, _ in judged(objects, judge)]


def judged(objects: list[Any], judge: Callable[[type], _T]) -> Iterator[tuple[Any, _T]]:
    """Those of whose class a verdict says anything, with the verdict, in their order.

    Each class is judged once, and no object is asked.
    """
    classes = list(map(type, objects))
    identities = Identities(classes)
    examples = [classes[position] for position in identities.first_positions()]
    # by identity, as a metaclass may define __hash__ and __eq__
    verdicts = {id(cls): verdict for cls in examples if (verdict := judge(cls))}
    for position in identities.where(IdentitySet(verdicts)):
        yield objects[position], verdicts[id(classes[position])]


def live_tensors() -> list[torch.Tensor]:
    """Every tensor with a handle in Python, in the order of the collector."""
    return instances(tracked_objects(), lambda cls: is_kind(cls, torch.Tensor))
