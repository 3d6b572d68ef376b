"""Where in a program an operation of a prediction belongs, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ._observer import Operation, OperationPlace


def describe_place(
    operation: Operation | None, operations: Sequence[Operation], names: Mapping[int, str]
) -> str:
    """Return the module and the line, as ``encoder.layers.3 (train.py:12)``, or "".

    Args:
        operation: one of a backward pass belongs where its node was made.
        operations: all of them.
        names: of modules, by identity.
    """
    if operation is None:
        return ""
    place = operation.place or _made_at(operation.sequence, operations)
    if place is None:
        return ""
    module = None if place.module is None else place.module()
    name = "" if module is None else names.get(id(module), type(module).__name__)
    line = place.line()
    return f"{name} ({line})" if name and line else name or line


def _made_at(sequence: int, operations: Sequence[Operation]) -> OperationPlace | None:
    """Return the place of the operation whose node has a number: the next one that is above it."""
    above = [each for each in operations if each.place is not None and each.sequence > sequence]
    return min(above, key=lambda each: each.sequence).place if above else None
