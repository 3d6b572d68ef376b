"""Arguments that an operation may enlarge in place, and how to give them back as they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tenure._torch.modes import schema_of
from tenure._torch.quiet import without_dispatch
from tenure._torch.storages import key_of

_aten = torch.ops.aten
_RESIZERS = frozenset({_aten.resize_, _aten.resize_as_, _aten.set_})
_known: dict[Any, tuple[tuple[str, ...], tuple[int, ...]]] = {}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the elements of a tensor lie; it holds the storage, so it is kept for one call only."""

    tensor: Tensor
    storage: UntypedStorage
    n_bytes: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def restore(self) -> None:
        """Give the tensor its old place, and the storage its old size; the elements stay."""
        if key_of(self.tensor.untyped_storage()) != key_of(self.storage) or self._is_moved():
            place: Any = self.tensor
            place.set_(self.storage, self.offset, self.shape, self.stride)
        if self.storage.nbytes() > self.n_bytes:
            self.storage.resize_(self.n_bytes)

    def _is_moved(self) -> bool:
        now = (self.tensor.storage_offset(), self.tensor.shape, self.tensor.stride())
        return now != (self.offset, self.shape, self.stride)


def geometries(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Geometry]:
    """The places of the arguments that ``func`` may enlarge; of most functions there are none."""
    places = _known.get(func)
    if places is None:
        places = _known[func] = _enlarged_arguments(func)
    names, positions = places
    if not names:
        return []
    chosen = [args[i] for i in positions if i < len(args)]
    chosen += [kwargs[name] for name in names if name in kwargs]
    return [_geometry_of(tensor) for tensor in _flat(chosen) if tensor.layout is torch.strided]


def restore(places: Iterable[Geometry]) -> None:
    """Undo what a refused operation did to the places of its arguments."""
    with without_dispatch():
        for place in places:
            place.restore()


def _enlarged_arguments(func: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and positions of the ``out=`` arguments, or of the tensor that is resized."""
    schema = schema_of(func)
    if schema is None:  # a higher-order operator
        return (), ()
    resizes = func.overloadpacket in _RESIZERS
    found = [
        (argument.name, position)
        for position, argument in enumerate(schema.arguments)
        if argument.is_out or (resizes and position == 0)
    ]
    return tuple(name for name, _ in found), tuple(position for _, position in found)


def _geometry_of(tensor: Tensor) -> Geometry:
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset())
    return Geometry(tensor, storage, storage.nbytes(), offset, tensor.shape, tensor.stride())


def _flat(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        found += [value] if isinstance(value, Tensor) else _flat(value)
    return found
