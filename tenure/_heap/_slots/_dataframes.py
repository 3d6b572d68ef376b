"""Names for what stands in a table of pandas: ``frame['loss'].iloc[3]``.

A frame has a manager, this has blocks of several columns each, and a block has an array; only the
manager knows the names of the columns. pandas is never imported here: its classes are known by
name.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from .._static import instance_attributes
from .._words import Key, Namer, Slot, Step, Wanted, attribute
from ._arrays import WHOLE_BASE
from ._containers import spell_key

_MAX_COLUMNS = 10_000
_MANAGER = "_mgr"


def table_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """The manager of a frame or series, which does not show in the name."""
    attributes = instance_attributes(holder)
    yield attributes, Step(namer=_table_attribute)
    yield attributes.get(_MANAGER), Step(key=_MANAGER)


def manager_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """The blocks of a manager."""
    is_frame = len(holder.axes) > 1
    columns = _columns_of(holder.axes[0]) if is_frame else []
    places = [[columns[i] for i in block.mgr_locs] if columns else [] for block in holder.blocks]
    yield holder.blocks, Step(namer=_blocks(places))


def block_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """The array of a block."""
    yield holder.values, Step(key="values")


def _table_attribute(key: Key) -> tuple[str, Namer | None]:
    return ("", None) if key == _MANAGER else attribute(key)


def _columns_of(labels: Sequence[object]) -> list[str]:
    return list(map(spell_key, labels)) if len(labels) <= _MAX_COLUMNS else []


def _blocks(places: list[list[str]]) -> Namer:
    return lambda key: ("", _values(places[key] if isinstance(key, int) else []))


def _values(columns: list[str]) -> Namer:
    return lambda _: ("", _items(columns))


def _items(columns: list[str]) -> Namer:
    def spell(key: Key) -> tuple[str, Namer | None]:
        # the array of a column that was added is a view with two dimensions of one with one
        return ("", spell) if key == WHOLE_BASE else (_spell(columns, str(key)), None)

    return spell


def _spell(columns: list[str], key: str) -> str:
    """An item by its place in the array of a block: column and row, or the row alone."""
    column, _, row = key.rpartition(", ")
    if not row.isdigit():
        return f".values.{key}"
    if not columns:
        return f".iloc[{row}, …]" if column else f".iloc[{row}]"
    return f"[{columns[int(column or 0)]}].iloc[{row}]"
