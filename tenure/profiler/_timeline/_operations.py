"""The mode that tells a recorder which operations have made storages, and which ran out of memory.

Invariant: what an operation gives back is handed on as it came, and nothing of it is held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import UntypedStorage

from tenure._storages import all_storages_of
from tenure._torch.compiler import never_compiled
from tenure._torch.gradient_sums import SUM, adds_plain_in_place, prepare
from tenure._torch.modes import EagerMode, schema_of
from tenure._torch.quiet import without_dispatch

_aten = torch.ops.aten
_LIFTS = frozenset({_aten.lift_fresh.default, _aten.lift.default})
"""What ``torch.tensor``, ``torch.from_numpy`` and the like call with the tensor they made."""
_RESIZERS = frozenset({_aten.resize_, _aten.resize_as_})
_COPIES = frozenset({_aten._to_copy, _aten._pin_memory, _aten.clone})
NOTHING, MAKES, RESIZES, ADOPTS, COPIES = range(5)
"""What an operation does to storages: it makes none, makes some, gives one another size, takes one
over that was made elsewhere, or makes one of the data of another."""
_NUMBER_BYTES = {float: 8, int: 8, bool: 1, complex: 16}


class _Operation(NamedTuple):
    """What is known of an operator: what it does to storages, and which arguments are tensors."""

    kind: int
    operands: tuple[int, ...]


_known: dict[Any, _Operation] = {}
Failed = Callable[[Exception], None]
"""Is told of an operation that has failed; raises nothing."""


class Told(Protocol):
    """Who is told of operations."""

    is_open: bool
    failed: Failed

    def made(self, out: Any, args: tuple[Any, ...], kind: int, caller: Any) -> None:
        """An operation of a kind has given this back."""

    def wraps(self, numbers: list[int]) -> None:
        """An operation is about to make tensors of these bytes of numbers that it was given."""

    def sums(self, first: UntypedStorage, total: UntypedStorage) -> None:
        """The sum ``total`` takes the place of ``first``, which is freed as soon as it is there."""


class OperationMode(EagerMode):
    """Tells of the operations of the thread that entered it, those of backward passes included."""

    supports_higher_order_operators = True

    def __init__(self, told: Told) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._told = told
        prepare()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile as without it: what runs compiled is told by the allocator alone."""
        return True

    @never_compiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and tell what it made."""
        told = self._told
        found = _known.get(func)
        if found is None:
            found = _known[func] = _described(func)
        kind, operands = found
        if operands and told.is_open:
            # In `x * 2` torch has made a tensor of the number, shows the number here, and makes
            # another one when it is called again: that is our doing, and not the program's.
            numbers = [_NUMBER_BYTES.get(type(args[i]), 0) for i in operands if i < len(args)]
            if any(numbers):
                told.wraps([n_bytes for n_bytes in numbers if n_bytes])
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            if told.is_open:
                told.failed(error)
            raise
        if kind and told.is_open:
            # None on a thread of autograd's engine
            caller = sys._getframe().f_back
            if func is SUM and adds_plain_in_place(args[0], caller):
                told.sums(args[0].untyped_storage(), out.untyped_storage())
            told.made(out, args, kind, caller)
        return out


def storages_in(value: Any) -> list[UntypedStorage]:
    """The storages of what an operation was given or gave back, of any layout and class."""
    if isinstance(value, torch.Tensor):
        with without_dispatch():
            return all_storages_of(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [storage for each in value for storage in storages_in(each)]


def _described(func: Any) -> _Operation:
    schema = schema_of(func)
    # a higher-order operator
    if schema is None:
        return _Operation(MAKES, ())
    operands = [i for i, each in enumerate(schema.arguments) if str(each.type) == "Tensor"]
    return _Operation(_kind_of(func, schema), tuple(operands) if len(operands) > 1 else ())


def _kind_of(func: Any, schema: Any) -> int:
    packet = func.overloadpacket
    if func in _LIFTS or packet is _aten.set_:
        return ADOPTS
    if packet in _RESIZERS or any(argument.is_out for argument in schema.arguments):
        return RESIZES
    if packet in _COPIES:
        return COPIES
    # what it gives back are its arguments, or views of them
    if all(each.alias_info is not None for each in schema.returns):
        return NOTHING
    return MAKES
