"""Backward passes of what weighs nothing, which run because other ranks wait in them.

A seed of zero does not do: the mean of nothing is 0 / 0, whose gradient is nan whatever it gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._isolated import nodes_of

_Gradients = tuple[Tensor | None, ...]


@contextmanager
def giving_zeros(weightless: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[None]:
    """Return a block in whose backward passes some roots give zeros to all that they come of.

    Args:
        weightless: these roots.
        others: further roots of the same passes; what they come of, too, gets their gradients.
    """
    nodes = nodes_of(weightless)
    shared = set(nodes_of(others)) if nodes else set()
    # to what is shared they add zeros
    own: list[Any] = [node for node in nodes if node not in shared and node.next_functions]
    handles = [node.register_hook(_zeros) for node in own]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(gradients: _Gradients, _: _Gradients) -> _Gradients:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
