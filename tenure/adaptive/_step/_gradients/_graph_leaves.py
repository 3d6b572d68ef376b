"""Which tensors a backward pass gives gradients to, read from its graph before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the graphs of ``roots``, each once; of a root that is a leaf, itself.

    A graph that a node makes only while it runs backward (reentrant checkpoints) is not seen.
    """
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    waiting: list[Any] = []
    for root in roots:
        if root.grad_fn is not None and root.grad_fn not in seen:
            seen.add(root.grad_fn)
            waiting.append(root.grad_fn)
        elif root.grad_fn is None and root.requires_grad:
            leaves[id(root)] = root
    while waiting:
        node = waiting.pop()
        below = node.next_functions
        if not below and (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        for other, _ in below:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return list(leaves.values())
