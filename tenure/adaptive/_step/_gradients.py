"""Gradients of one attempt, kept apart from those that were there before it.

Invariant: until ``finish`` every ``.grad`` that was there is untouched, so that an attempt that
failed leaves no trace; ``finish`` adds in place, and the objects in ``.grad`` stay the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tenure.scopes import persist

from .._torch_dispatch import without_functions
from ._held_hooks import HeldHooks


class _Held(NamedTuple):
    leaf: Tensor
    prior: Tensor | None


class IsolatedGradients:
    """Sets the gradients of leaf tensors aside while an attempt makes new ones.

    Args:
        leaves: those that are known before the attempt; `watch` adds others.
    """

    __slots__ = ("_held", "_hooks", "_leaves")

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = list(leaves)
        self._held: dict[int, _Held] = {}
        self._hooks = HeldHooks()

    def begin(self) -> None:
        """Set aside what is there."""
        self._held = {}
        self.watch(self._leaves)

    def watch(self, leaves: Iterable[Tensor]) -> None:
        """Set aside the gradients of more leaves, before the first backward pass that has them."""
        held = self._held
        with without_functions():
            for leaf in leaves:
                if id(leaf) not in held:
                    prior = leaf.grad
                    held[id(leaf)] = _Held(leaf, prior)
                    if prior is not None:
                        leaf.grad = None

    def watches(self, leaf: Tensor) -> bool:
        """Whether the gradient of a leaf has been set aside."""
        return id(leaf) in self._held

    def leaves(self) -> list[Tensor]:
        """All leaves that are watched."""
        return [held.leaf for held in self._held.values()]

    def new(self) -> list[tuple[Tensor, Tensor]]:
        """The leaves that this attempt has given a gradient, and that gradient."""
        with without_functions():
            pairs = [(held.leaf, held.leaf.grad) for held in self._held.values()]
        return [(leaf, grad) for leaf, grad in pairs if grad is not None]

    def hold_hooks(self, leaves: Iterable[Tensor]) -> None:
        """Let the hooks of leaves wait: they get the sum of several backward passes, once."""
        self._hooks.hold(leaves)

    def scale(self, factor: Tensor) -> None:
        """Multiply the new gradients.

        Args:
            factor: of no dimension.
        """
        factors: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for _, grad in self.new():
                if grad.device not in factors:
                    factors[grad.device] = factor.to(grad.device)
                grad.mul_(factors[grad.device])

    def finish(self) -> None:
        """Add the new gradients to the old ones; what allocates comes first."""
        with persist(), torch.no_grad():
            self._hooks.run()
            new = {id(leaf): gradient for leaf, gradient in self.new()}
            pairs = [
                (held.leaf, held.prior, new.get(id(held.leaf)))
                for held in self._held.values()
                if held.prior is not None
            ]
            sums = [_sum_that_allocates(prior, gradient) for _, prior, gradient in pairs]
            for (leaf, prior, gradient), total in zip(pairs, sums, strict=True):
                leaf.grad = _added(prior, gradient, total)
        self._held = {}

    def undo(self) -> None:
        """Drop the new gradients, and put the old ones back."""
        self._hooks.put_back()
        with without_functions():
            for leaf, prior in self._held.values():
                if leaf.grad is not prior:
                    leaf.grad = prior
        self._held = {}


def _sum_that_allocates(prior: Tensor, new: Tensor | None) -> Tensor | None:
    """The sum, where adding in place would allocate; two dense ones are added later.

    A gradient whose elements share memory can't be added to in place.
    """
    if new is None:
        return None
    if (
        prior.layout is torch.strided
        and new.layout is torch.strided
        and not _shares_elements(prior)
    ):
        return None
    return prior + new if prior.layout is torch.strided else new + prior


def _added(prior: Tensor, new: Tensor | None, total: Tensor | None) -> Tensor:
    """What autograd would leave in ``.grad``: the old object, unless it grows from sparse to dense.

    Source: ``AccumulateGrad::accumulateGrad`` of torch/csrc/autograd/functions/accumulate_grad.h.
    """
    if total is None:
        if new is not None:
            prior.add_(new)
    elif total.layout is prior.layout:
        prior.data = total
    else:
        return total
    return prior


def _shares_elements(tensor: Tensor) -> bool:
    return 0 in tensor.stride() and tensor.numel() > 1
