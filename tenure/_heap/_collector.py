"""What the garbage collector tracks, also behind its back: `gc.freeze` hides objects from it.

Frozen objects are looked for from everything that is alive by itself, and stay frozen. What they
alone hold is found as well. A frozen reference cycle that nothing else refers to is not, nor is a
frozen tensor that only a NumPy array holds.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch

from tenure._callers import is_tenure

from ._identities import Identities, IdentitySet
from ._reading import is_kind, read_locals

_T = TypeVar("_T")

# objects whose referents are asked for together
_CHUNK = 4096

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


def has_frozen() -> bool:
    """Whether the functions of `gc` leave objects out."""
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
    """Every object that the collector tracks, in its order; then the frozen ones."""
    # before the list is made: what it holds can't be read without leaving a trace
    roots = _roots() if has_frozen() else []
    found = _Heap(gc.get_objects())
    _heaps.append(weakref.ref(found, _heaps.remove))
    endless = sys.modules.get(_ENDLESS)
    if endless is not None:
        for position in Identities(found).where(IdentitySet([id(endless)])):
            del found[position]
    if roots:
        # our own list, which would pass for a holder of every local variable
        del found[list(map(id, found)).index(id(roots))]
        found.extend(_frozen(found, roots))
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


def _frozen(unfrozen: list[Any], roots: list[Any]) -> list[Any]:
    found: list[Any] = []
    fresh: list[Any] = []
    seen = {*map(id, (unfrozen, roots, found, fresh)), *map(id, unfrozen)}
    fresh += {id(root): root for root in roots if id(root) not in seen}.values()
    fresh += _new_referents(unfrozen, seen.union(map(id, fresh)))
    while fresh:
        seen.update(map(id, fresh))
        found += fresh
        fresh = _new_referents(fresh, seen)
    return found


def _new_referents(holders: list[Any], seen: set[int]) -> list[Any]:
    found: dict[int, Any] = {}
    for start in range(0, len(holders), _CHUNK):
        for held in gc.get_referents(*holders[start : start + _CHUNK]):
            if id(held) not in seen and gc.is_tracked(held) and not is_endless(held):
                found[id(held)] = held
    return list(found.values())


def _roots() -> list[Any]:
    found: list[Any] = [sys.modules, *sys.modules.values()]
    frame: FrameType | None
    for frame in sys._current_frames().values():
        # walking on with the same variable: if it kept our own frame, that would be a cycle
        while frame is not None:
            if not is_tenure(frame):
                found += (value for _, value in read_locals(frame))
            frame = frame.f_back
    return [root for root in found if gc.is_tracked(root) and not is_endless(root)]


def live_tensors() -> list[torch.Tensor]:
    """Every tensor with a handle in Python, in the order of the collector."""
    return instances(tracked_objects(), lambda cls: is_kind(cls, torch.Tensor))
