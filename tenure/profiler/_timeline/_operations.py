"""The mode that tells a recorder which operations have made storages, and which ran out of memory.

Invariant: what an operation gives back is handed on as it came, and nothing of it is held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import UntypedStorage

from tenure._storages import all_storages_of
from tenure._stream import Stream, run
from tenure._torch.compiler import never_compiled
from tenure._torch.gradient_sums import prepare
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
_known: dict[Any, int] = {}
Failed = Callable[[Exception], None]
"""Is told of an operation that has failed; raises nothing."""


class Told(Protocol):
    """Who is told of operations."""

    is_open: bool
    failed: Failed
    stream: Stream

    def made(self, out: Any, args: tuple[Any, ...], kind: int, caller: Any) -> None:
        """An operation of a kind has given this back."""

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
        kind = _known.get(func)
        if kind is None:
            kind = _known[func] = _kind_of(func)
        try:
            out = run(func, args, kwargs or {}, mode=self, stream=told.stream, sums=told.sums)
        except Exception as error:
            if told.is_open:
                told.failed(error)
            raise
        if kind and told.is_open:
            # None on a thread of autograd's engine
            told.made(out, args, kind, sys._getframe().f_back)
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


def _kind_of(func: Any) -> int:
    schema = schema_of(func)
    # a higher-order operator
    if schema is None:
        return MAKES
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
