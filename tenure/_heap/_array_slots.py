"""What arrays of NumPy refer to: objects, and the array whose memory they show.

The collector knows nothing of the former. NumPy is never imported here: without it there are no
arrays.
"""

import gc
import sys
from collections.abc import Iterator
from typing import Any

from ._reading import is_kind
from ._words import Slot, Step, Wanted


def array_class() -> type | None:
    """The class of arrays; None where NumPy is not in the process, or still on its way there."""
    found: type | None = getattr(sys.modules.get("numpy"), "ndarray", None)
    return found


def is_array(found: object) -> bool:
    """Whether an object is an array, of a subclass too."""
    cls = array_class()
    return cls is not None and is_kind(type(found), cls)


def referents_of(holder: object) -> list[object]:
    """What an object refers to, an array's objects and base too; several times if it does so."""
    held = gc.get_referents(holder)
    if is_array(holder):
        held += _items_of(holder)
        held += _base_of(holder)
    return held


def array_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """Items of an array of objects by their index, and the array that it is a view of."""
    for prefix, column in _columns_of(holder):
        shape = _read(column, "shape")
        for position, held in enumerate(_flat(column)):
            if id(held) in wanted:
                key = _spell_index(position, shape)
                yield held, Step(f"{prefix}[{key}]", key=prefix or key)
    for base in _base_of(holder):
        yield base, Step(".base", key="base")


def holds_objects(array: Any) -> bool:
    """Whether references are among what an array shows."""
    return bool(_read(array, "dtype").hasobject)


def _items_of(array: Any) -> list[object]:
    """The objects in the memory of an array; none in that of a view, whose base has them."""
    return [held for _, column in _columns_of(array) for held in _flat(column)]


def _columns_of(array: Any) -> list[tuple[str, Any]]:
    """An array that has objects of its own; of a structured one the fields that are such."""
    return _fields_of("", array) if _read(array, "flags").owndata else []


def _fields_of(prefix: str, array: Any) -> list[tuple[str, Any]]:
    names: tuple[str, ...] | None = _read(array, "dtype").names
    if not holds_objects(array):
        return []
    if names is None:
        return [(prefix, array)]
    cls: Any = array_class()
    fields = ((f"{prefix}[{name!r}]", cls.__getitem__(array, name)) for name in names)
    return [found for label, field in fields for found in _fields_of(label, field)]


def _flat(array: Any) -> list[object]:
    cls: Any = array_class()
    found: list[object] = cls.tolist(cls.reshape(array, -1))
    return found


def _base_of(array: Any) -> list[object]:
    base = _read(array, "base")
    return [base] if is_array(base) else []


def _read(array: Any, name: str) -> Any:
    """An attribute as the base class has it."""
    return getattr(array_class(), name).__get__(array)


def _spell_index(position: int, shape: tuple[int, ...]) -> str:
    index: list[int] = []
    for length in reversed(shape):
        position, remainder = divmod(position, length)
        index.append(remainder)
    return ", ".join(map(str, reversed(index)))
