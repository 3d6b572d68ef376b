"""Hooks of leaves that wait until a gradient is whole.

Invariant: a hook runs once, inside a backward pass, with the sum of what several passes made; and
whatever happens, the hooks of a leaf are there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tenure._torch.autograd import hooks_of

_Hooks = dict[int, Callable[[Tensor], Any]]


class HeldHooks:
    """The hooks that wait, in the order of their leaves."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, _Hooks]] = []

    def hold(self, leaves: Iterable[Tensor]) -> None:
        """Take the hooks of leaves away."""
        for leaf in leaves:
            hooks = hooks_of(leaf)
            if hooks:
                self._held.append((leaf, dict(hooks)))
                hooks.clear()

    def run(self) -> None:
        """Put them back, and run them in one backward pass from the leaves themselves."""
        leaves = [leaf for leaf, _ in self._held if leaf.grad is not None and leaf.requires_grad]
        self.put_back()
        if leaves:
            gradients = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward(leaves, gradients)

    def put_back(self) -> None:
        """Give the leaves their hooks, before those that were added meanwhile."""
        for leaf, hooks in self._held:
            present: dict[int, Any] = hooks_of(leaf)
            added_meanwhile = dict(present)
            present.clear()
            present.update(hooks | added_meanwhile)
        self._held = []
