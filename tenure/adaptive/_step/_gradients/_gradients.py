"""Gradients of one attempt, kept apart from those that were there before it.

Invariant: until ``finish`` every ``.grad`` that was there is untouched, so that an attempt that
failed leaves no trace; ``finish`` adds in place, and the objects in ``.grad`` stay the same ones.
Whatever is raised in the middle of it, all are added in the end, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tenure._torch.quiet import without_functions
from tenure._torch.writes import counter_of
from tenure.scopes import persist

from ._held_hooks import HeldHooks


class _Held(NamedTuple):
    leaf: Tensor
    prior: Tensor | None


class _Delivery(NamedTuple):
    """What is left to do when gradients are delivered; doing it twice changes nothing.

    Attributes:
        added: old gradients, the new ones to add in place, and how often the old had been written.
        replaced: old gradients, and the sums that take their place in the same objects.
        assigned: leaves, and what stands in ``.grad`` at the end.
    """

    added: list[tuple[Tensor, Tensor, int]]
    replaced: list[tuple[Tensor, Tensor]]
    assigned: list[tuple[Tensor, Tensor]]

    def run(self) -> None:
        # one addition is one call into C, that no interrupt can divide, and it counts a version
        for prior, new, version in self.added:
            if counter_of(prior) == version:
                prior.add_(new)
        for prior, total in self.replaced:
            prior.data = total
        for leaf, gradient in self.assigned:
            leaf.grad = gradient


class IsolatedGradients:
    """Sets the gradients of leaf tensors aside while an attempt makes new ones.

    Args:
        leaves: those that are known before the attempt; `watch` adds others.
    """

    __slots__ = ("_delivery", "_held", "_hooks", "_leaves")

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = list(leaves)
        self._held: dict[int, _Held] = {}
        self._hooks = HeldHooks()
        self._delivery: _Delivery | None = None

    @property
    def is_delivered(self) -> bool:
        """Whether new gradients have begun to be delivered, after which there is no way back."""
        return self._delivery is not None

    def begin(self) -> None:
        """Set aside what is there."""
        self._held, self._delivery = {}, None
        try:
            self.watch(self._leaves)
        except BaseException:  # an interrupt; who fails to begin is not asked to undo
            self.undo()
            raise

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
        """Add the new gradients to the old ones; what allocates, or may fail, comes first.

        Raised out of in the middle, as by an interrupt, it finishes when it is called again.
        """
        with persist(), torch.no_grad():
            if self._delivery is None:
                self._hooks.run()
                with without_functions():
                    self._delivery = self._planned()
            with without_functions():
                self._delivery.run()
        self._held = {}

    def undo(self) -> None:
        """Drop the new gradients, and put the old ones back."""
        self._hooks.put_back()
        with without_functions():
            for leaf, prior in self._held.values():
                if leaf.grad is not prior:
                    leaf.grad = prior
        self._held = {}

    def _planned(self) -> _Delivery:
        """What autograd would leave in ``.grad``: the old objects, unless sparse becomes dense.

        Source: ``AccumulateGrad::accumulateGrad`` of torch/csrc/autograd/functions/
        accumulate_grad.h.
        """
        plan = _Delivery([], [], [])
        new = {id(leaf): gradient for leaf, gradient in self.new()}
        for leaf, prior in self._held.values():
            if prior is None:
                continue
            gradient = new.get(id(leaf))
            total = None if gradient is None else _sum_that_allocates(prior, gradient)
            if total is not None and total.layout is not prior.layout:
                plan.assigned.append((leaf, total))
                continue
            if total is not None:
                plan.replaced.append((prior, total))
            elif gradient is not None:
                plan.added.append((prior, gradient, counter_of(prior)))
            plan.assigned.append((leaf, prior))
        return plan


def _sum_that_allocates(prior: Tensor, new: Tensor) -> Tensor | None:
    """The sum, where adding in place would allocate; two dense ones are added later.

    A gradient whose elements share memory can't be added to in place, and one made in inference
    mode counts no versions.
    """
    if (
        prior.layout is torch.strided
        and new.layout is torch.strided
        and not _shares_elements(prior)
        and not prior.is_inference()
    ):
        return None
    return prior + new if prior.layout is torch.strided else new + prior


def _shares_elements(tensor: Tensor) -> bool:
    return 0 in tensor.stride() and tensor.numel() > 1
