"""The containers that users have registered with torch's pytree, which has no public module yet.

``children_of`` looks one level down and never into a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree


def children_of(node: object) -> Sequence[Any] | None:
    """The children of a registered container, or None if its type is not registered."""
    registered = _pytree.SUPPORTED_NODES.get(type(node))
    if registered is None:
        return None
    children, _ = registered.flatten_fn(node)
    return list(children)


@dataclass
class _Pair:
    left: int
    right: int


def works() -> bool:
    """Whether a freshly registered container is found and taken apart."""
    _pytree.register_pytree_node(
        _Pair, lambda pair: ([pair.left, pair.right], None), lambda items, _: _Pair(*items)
    )
    try:
        return children_of(_Pair(1, 2)) == [1, 2] and children_of(object()) is None
    finally:
        _pytree.SUPPORTED_NODES.pop(_Pair)
