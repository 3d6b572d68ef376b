"""The containers that users have registered with torch's pytree, which has no public module yet.

Each function looks one level down and never into a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import bound

_registered = bound("torch.utils._pytree.SUPPORTED_NODES", "containers of results and batches")


def is_registered(node: object) -> bool:
    """Whether its type is one of them."""
    return _registered.get(type(node)) is not None


def parts_of(node: object) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a registered container, and what makes one like it of other children."""
    registered = _registered.get(type(node))
    if registered is None:
        return None
    children, context = registered.flatten_fn(node)
    return list(children), lambda others: registered.unflatten_fn(others, context)


@dataclass
class _Pair:
    left: int
    right: int


def works() -> bool:
    """Whether a freshly registered container is found, taken apart and put together."""
    bound("torch.utils._pytree.register_pytree_node", "this test")(
        _Pair, lambda pair: ([pair.left, pair.right], None), lambda items, _: _Pair(*items)
    )
    try:
        parts = parts_of(_Pair(1, 2))
        return parts is not None and parts[0] == [1, 2] and parts[1]([3, 4]) == _Pair(3, 4)
    finally:
        _registered.pop(_Pair)
