"""Operations in a dispatch mode that measures: some of their allocations are the mode's doing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, UntypedStorage
from torch.nn import Buffer, Parameter

from tenure._storages import all_storages_of
from tenure._torch.gradient_sums import SUMS_AND_FILLS, writes_in_place
from tenure._torch.modes import schema_of
from tenure._torch.quiet import without_dispatch

from ._stream import AllocationStream

_PLAIN = frozenset({Tensor, Parameter, Buffer})
_NUMBER_BYTES = {float: 8, int: 8, bool: 1, complex: 16}
_operands: dict[Any, tuple[int, ...]] = {}


def run(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    mode: Any,
    stream: AllocationStream,
    sums: Callable[[UntypedStorage, UntypedStorage], None],
) -> Any:
    """Run an operation in the handler of a mode that measures, and hide what the mode adds to it.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: those that have names.
        mode: the mode whose handler calls this; while it measures, it is one of ``stream.modes``.
        stream: the stream of the thread that entered the mode.
        sums: called with the storage of an operand, and that of a result which autograd would write
            into the operand if no mode measured.
    """
    numbers = _wrapped_numbers(func, args)
    if numbers:
        stream.hide_numbers(numbers)
    if func not in SUMS_AND_FILLS:
        return func(*args, **kwargs)
    stream.hold(+1)
    try:
        total = func(*args, **kwargs)
        # the frame that called the handler; None on a thread of autograd's engine
        caller = sys._getframe(1).f_back
        if mode in stream.modes:
            n_above = stream.modes[::-1].index(mode)
            # the engine writes into no subclass
            if type(args[0]) is Tensor and writes_in_place(func, args[0], caller, n_above):
                sums(args[0].untyped_storage(), total.untyped_storage())
    finally:
        stream.hold(-1)
    return total


def storages_in(value: Any) -> list[UntypedStorage]:
    """Return the storages of the tensors that an operation got or gave back, of any class."""
    if type(value) in _PLAIN:
        # sparse, opaque and nested layouts have none of their own
        try:
            return [value.untyped_storage()]
        except (RuntimeError, NotImplementedError):
            pass
    if isinstance(value, Tensor):
        with without_dispatch():
            return all_storages_of(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [storage for each in value for storage in storages_in(each)]


def _wrapped_numbers(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of the numbers that an operator gets in place of tensors."""
    places = _operands.get(func)
    if places is None:
        schema = schema_of(func)
        arguments = () if schema is None else schema.arguments
        tensors = tuple(i for i, each in enumerate(arguments) if str(each.type) == "Tensor")
        places = _operands[func] = tensors if len(tensors) > 1 else ()
    if not places:
        return []
    sizes = [_NUMBER_BYTES.get(type(args[i]), 0) for i in places if i < len(args)]
    return [size for size in sizes if size] if any(sizes) else []
