"""Telling torch.compile which dimension changes its size, so that one graph serves them all.

Without it dynamo compiles once for the first size, and again when it meets another. Where nothing
is compiled, dynamo is not loaded, and nothing is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let compiled code that gets ``tensor`` expect other sizes of a dimension, unless it can't.

    Dynamo still compiles a size of 1 by itself, and one that the code itself compares with a
    number.
    """
    # half imported, on another thread, it has no such name yet
    mark = getattr(sys.modules.get("torch._dynamo"), "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, dim % tensor.dim())


@contextmanager
def marked_dynamic(tensors: Iterable[tuple[Tensor, int]]) -> Iterator[None]:
    """A block in which tensors of the user's own are marked; they keep nothing of it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for tensor, dim in tensors:
        space = vars(tensor)
        # the user has marked it: that holds, whatever it says
        if not any(name.startswith("_dynamo_") for name in space):
            before.append((space, space.copy()))
            mark_dynamic(tensor, dim)
    try:
        yield
    finally:
        for space, attributes in before:
            for name in space.keys() - attributes.keys():
                if "_dynamo_" in name:
                    del space[name]
