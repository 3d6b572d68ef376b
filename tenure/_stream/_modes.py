"""What a dispatch mode makes torch allocate that the program alone does not."""

from __future__ import annotations

from types import FrameType
from typing import Any

from tenure._torch.gradient_sums import SUM as SUM
from tenure._torch.gradient_sums import adds_plain_in_place
from tenure._torch.modes import schema_of

from ._stream import Stream

_NUMBER_BYTES = {float: 8, int: 8, bool: 1, complex: 16}
_operands: dict[Any, tuple[int, ...]] = {}


def wrapped_numbers(func: Any, args: tuple[Any, ...]) -> list[int]:
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


def is_sum_in_place(
    args: tuple[Any, ...], caller: FrameType | None, mode: Any, stream: Stream
) -> bool:
    """Whether autograd would add two gradients in place if no mode measured; asked in a handler.

    Args:
        args: those of a `SUM`.
        caller: the caller of the handler.
        mode: the mode whose handler asks, one of ``stream.modes``.
        stream: the stream of the thread that entered it.
    """
    n_above = len(stream.modes) - 1 - stream.modes.index(mode)
    return adds_plain_in_place(args[0], caller, n_above)
