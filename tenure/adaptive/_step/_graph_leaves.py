"""Which tensors a backward pass gives gradients to, read from its graph before it runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def leaves_of(root: Tensor) -> list[Tensor]:
    """The leaves of the graph of ``root``; itself, if it is one.

    A graph that a node makes only while it runs backward (reentrant checkpoints) is not seen.
    """
    if root.grad_fn is None:
        return [root] if root.requires_grad else []
    first: Any = root.grad_fn
    leaves: list[Tensor] = []
    seen = {first}
    waiting = [first]
    while waiting:
        node = waiting.pop()
        below = node.next_functions
        if not below and (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        for other, _ in below:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return leaves
