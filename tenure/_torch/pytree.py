"""The containers that users have registered with torch's pytree, which has no public module yet.

Each function looks one level down and never into a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import bound

_registered = bound("torch.utils._pytree.SUPPORTED_NODES", "containers of results and batches")


def is_registered(node: object) -> bool:
    """Return whether its type is one of them."""
    return _registration_of(node) is not None


def parts_of(node: object) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a registered container, and a function that rebuilds it."""
    registered = _registration_of(node)
    if registered is None:
        return None
    children, context = registered.flatten_fn(node)
    return list(children), lambda others: registered.unflatten_fn(others, context)


def _registration_of(node: object) -> Any:
    # by its exact type, as torch does: a subclass of a registered class is a leaf, and so is an
    # object whose type has no hash, because its metaclass defines __eq__ alone
    return None if type(type(node)).__hash__ is None else _registered.get(type(node))
