"""The leaves of a backward pass: which they are, and hooks that wait until a gradient is whole.

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
        # `AccumulateGrad` alone has a `variable` and nothing below it
        below = node.next_functions
        if not below and (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        for other, _ in below:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return list(leaves.values())


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
                # in the same dict: autograd of C++ holds it, and a removable handle, too
                hooks.clear()

    def run(self) -> None:
        """Put them back, and run them in one backward pass from the leaves themselves."""
        # a leaf that got none has hooks that autograd would not run either
        leaves = [leaf for leaf, _ in self._held if leaf.grad is not None and leaf.requires_grad]
        self.put_back()
        if leaves:
            # a backward pass of its own, because only there a hook may change the gradient, and
            # hooks of several leaves fire together: see
            # test_a_hook_of_several_gradients_runs_once_with_all_of_them
            gradients = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward(leaves, gradients)

    def put_back(self) -> None:
        """Give the leaves their hooks, before those that were added meanwhile."""
        for leaf, hooks in self._held:
            present: dict[int, Any] = hooks_of(leaf)
            # the order of a dict is the order in which hooks run
            added_meanwhile = dict(present)
            present.clear()
            present.update(hooks | added_meanwhile)
        self._held = []
