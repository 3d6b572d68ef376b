"""Holders that the collector does not show: arrays of NumPy, named results of torch."""

import gc
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, filterfalse
from typing import Any

from tenure._storages import storage_key

from ._collector import instances, of_classes, subclasses_of, tracked_objects
from ._reading import (
    array_class,
    class_attributes,
    is_array,
    referents_of,
    variables_of_stack,
)

# objects whose references are looked at together
_CHUNK = 16_384


def hidden_objects() -> list[Any]:
    """Return what the collector does not track and that may lead to a tensor.

    That is arrays (tracked ones too), tuples that C code made with named fields, such as
    ``x.max(0)``, and dictionaries and tuples with nothing in them that is tracked.
    """
    arrays = array_class()
    tuples = filter(_has_named_fields, type.__subclasses__(tuple))
    kinds = (dict, tuple, *tuples, *(subclasses_of(arrays) if arrays else ()))
    # by identity: a metaclass may define __hash__ and __eq__
    classes = frozenset(map(id, kinds))
    held = list(chain.from_iterable(map(variables_of_stack, sys._current_frames().values())))
    heap = tracked_objects()
    found = {id(array): array for array in instances(heap, arrays)} if arrays else {}
    held += referents_of(*found.values())
    for start in range(0, len(heap), _CHUNK):
        held += gc.get_referents(*heap[start : start + _CHUNK])
        while held:
            untracked = filterfalse(gc.is_tracked, of_classes(held, classes))
            # an empty dictionary may be the emptied snapshot of a frame
            fresh = {
                id(each): each
                for each in untracked
                if id(each) not in found and (type(each) is not dict or each)
            }
            found.update(fresh)
            held = referents_of(*fresh.values())
    return list(found.values())


def arrays_by_storage(objects: Sequence[object]) -> dict[int | None, list[int]]:
    """Return by storage the positions of the arrays among some objects."""
    found: defaultdict[int | None, list[int]] = defaultdict(list)
    for position, array in enumerate(objects):
        if is_array(array):
            found[storage_key(_owner_of(array))].append(position)
    return found


def _owner_of(array: Any) -> Any:
    return _owner_of(array.base) if is_array(array) else array


def _has_named_fields(cls: type) -> bool:
    return "n_sequence_fields" in class_attributes(cls)
