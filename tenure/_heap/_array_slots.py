"""What arrays of NumPy refer to: objects, and the array whose memory they show; and tables of them.

The collector knows nothing of the former. NumPy and pandas are never imported here: without NumPy
there are no arrays, and the classes of pandas are known by name.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ._reading import instance_attributes, is_kind
from ._words import Key, Namer, Slot, Step, Wanted, attribute, spell_key

# the key of the base of a view that shows all of it in the same order, if in another shape
_WHOLE_BASE = "whole base"
_MAX_COLUMNS = 10_000
_MANAGER = "_mgr"


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
        yield base, Step(".base", key=_WHOLE_BASE if _shows_all(holder, base) else "base")


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


def _shows_all(view: Any, base: Any) -> bool:
    is_in_order = _read(view, "flags").c_contiguous and _read(base, "flags").c_contiguous
    return bool(is_in_order and _read(view, "size") == _read(base, "size"))


def _read(array: Any, name: str) -> Any:
    """An attribute as the base class has it."""
    return getattr(array_class(), name).__get__(array)


def _spell_index(position: int, shape: tuple[int, ...]) -> str:
    index: list[int] = []
    for length in reversed(shape):
        position, remainder = divmod(position, length)
        index.append(remainder)
    return ", ".join(map(str, reversed(index)))


# --- tables of pandas: ``frame['loss'].iloc[3]``
#
# A frame has a manager, this has blocks of several columns each, and a block has an array; only the
# manager knows the names of the columns.


def table_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """The manager of a frame or series, which does not show in the name."""
    attributes = instance_attributes(holder)
    yield attributes, Step(namer=_table_attribute)
    yield attributes.get(_MANAGER), Step(key=_MANAGER)


def manager_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """The blocks of a manager."""
    is_frame = len(holder.axes) > 1
    columns = _labels_of(holder.axes[0]) if is_frame else []
    places = [[columns[i] for i in block.mgr_locs] if columns else [] for block in holder.blocks]
    yield holder.blocks, Step(namer=_blocks(places))


def block_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """The array of a block."""
    yield holder.values, Step(key="values")


def _table_attribute(key: Key) -> tuple[str, Namer | None]:
    return ("", None) if key == _MANAGER else attribute(key)


def _labels_of(labels: Sequence[object]) -> list[str]:
    return list(map(spell_key, labels)) if len(labels) <= _MAX_COLUMNS else []


def _blocks(places: list[list[str]]) -> Namer:
    return lambda key: ("", _values(places[key] if isinstance(key, int) else []))


def _values(columns: list[str]) -> Namer:
    return lambda _: ("", _ItemsByLabel(columns))


class _ItemsByLabel:
    """Spells items of a block; a function that gives itself back would be a cycle, and garbage."""

    def __init__(self, columns: list[str]) -> None:
        self._columns = columns

    def __call__(self, key: Key) -> tuple[str, Namer | None]:
        # the array of a column that was added is a view with two dimensions of one with one
        return ("", self) if key == _WHOLE_BASE else (_spell_cell(self._columns, str(key)), None)


def _spell_cell(columns: list[str], key: str) -> str:
    """An item by its place in the array of a block: column and row, or the row alone."""
    column, _, row = key.rpartition(", ")
    if not row.isdigit():
        return f".values.{key}"
    if not columns:
        return f".iloc[{row}, …]" if column else f".iloc[{row}]"
    return f"[{columns[int(column or 0)]}].iloc[{row}]"
