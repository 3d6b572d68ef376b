"""Gradients of one attempt, kept apart from those that were there before it.

Invariant: until ``finish`` every ``.grad`` that was there is untouched, so that an attempt that
failed leaves no trace; ``finish`` adds in place, and the objects in ``.grad`` stay the same ones.
Whatever is raised in the middle of it, all are added in the end, or none.

The hooks of a leaf wait until its gradient is whole: each runs once, inside a backward pass, with
the sum of what several passes made; and whatever happens, it is there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._registries import gradients_aside
from tenure._torch.autograd import hooks_of
from tenure._torch.quiet import without_functions
from tenure._torch.writes import counter_of
from tenure.scopes import persist

_Hooks = dict[int, Callable[[Tensor], Any]]


class _HeldGradient(NamedTuple):
    leaf: Tensor
    prior: Tensor | None


class _PendingDelivery(NamedTuple):
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

    __slots__ = ("_delivery", "_held", "_hooks", "_leaves", "_with_old")

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = list(leaves)
        self._with_old: set[int] = set()
        # by identity: two leaves may hold the same numbers; each is kept, so that its id stays its
        # own
        self._held: dict[int, _HeldGradient] = {}
        self._hooks = _HeldHooks()
        # None until the point of no return; a second `finish` goes on where the first was
        # interrupted
        self._delivery: _PendingDelivery | None = None

    @property
    def is_delivered(self) -> bool:
        """Whether new gradients have begun to be delivered, after which there is no way back."""
        return self._delivery is not None

    def are_there_before(self) -> bool:
        """Return whether a leaf that is known before the attempt has a gradient now."""
        with without_functions():
            return gradients_aside.get() or any(leaf.grad is not None for leaf in self._leaves)

    def begin(self) -> None:
        """Set aside what is there."""
        self._held, self._delivery, self._with_old = {}, None, set()
        try:
            self.watch(self._leaves)
        except BaseException:
            # an interrupt; who fails to begin is not asked to undo
            self.undo()
            raise

    def watch(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Set aside the gradients of more leaves, before the first backward pass that has them.

        Returns:
            Those that were not watched yet.
        """
        held, new = self._held, []
        # a mode of the user's would count, and a scope would own, what is only looked at
        with without_functions():
            for leaf in leaves:
                if id(leaf) not in held:
                    prior = leaf.grad
                    held[id(leaf)] = _HeldGradient(leaf, prior)
                    new.append(leaf)
                    if prior is not None:
                        leaf.grad = None
        return new

    def leaves(self) -> list[Tensor]:
        """Return all leaves that are watched."""
        return [held.leaf for held in self._held.values()]

    def new(self) -> list[tuple[Tensor, Tensor]]:
        """Return the leaves that this attempt has given a gradient, and that gradient."""
        with without_functions():
            pairs = [(held.leaf, held.leaf.grad) for held in self._held.values()]
        return [(leaf, grad) for leaf, grad in pairs if grad is not None]

    def old(self, leaf: Tensor) -> Tensor | None:
        """Return the gradient that a leaf had before."""
        return self._held[id(leaf)].prior

    def contains_old(self, leaf: Tensor) -> None:
        """Note that the old gradient of a leaf has been added to its new one."""
        self._with_old.add(id(leaf))

    def run_hooks(self) -> None:
        """Let the hooks that wait see the gradients now; `finish` would do it."""
        with persist(), torch.no_grad():
            self._hooks.run()

    def hold_hooks(self, leaves: Iterable[Tensor]) -> None:
        """Let the hooks of leaves wait: they get the sum of several backward passes, once."""
        self._hooks.hold(leaves)

    def scale(self, factor: Tensor) -> None:
        """Multiply the new gradients.

        Args:
            factor: of no dimension.
        """
        # parameters may stand on several devices: one copy for each, not for each gradient
        factors: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for _, grad in self.new():
                if grad.device not in factors:
                    factors[grad.device] = factor.to(grad.device)
                grad.mul_(factors[grad.device])

    def finish(self) -> None:
        """Add the new gradients to the old ones; what allocates, or may fail, comes first.

        See Note [Retry and undo], rule 3. Raised out of in the middle, as by an interrupt, it
        finishes when it is called again.
        """
        # sums are the user's gradients from now on, and no scope may let go of them
        with persist(), torch.no_grad():
            if self._delivery is None:
                # hooks of the user's may fail, and then nothing is delivered: see
                # test_a_hook_that_fails_as_gradients_are_delivered_leaves_buffers_as_they_were
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
                # an attempt that failed early left most of them as they were
                if leaf.grad is not prior:
                    leaf.grad = prior
        self._held = {}

    def _planned(self) -> _PendingDelivery:
        """Return what autograd would leave in ``.grad``: the old objects, if layouts agree.

        Source: ``AccumulateGrad::accumulateGrad`` of torch/csrc/autograd/functions/
        accumulate_grad.h.
        """
        plan = _PendingDelivery([], [], [])
        new = {id(leaf): gradient for leaf, gradient in self.new()}
        for leaf, prior in self._held.values():
            # the new one stands in `.grad` already
            if prior is None:
                continue
            gradient = new.get(id(leaf))
            if gradient is not None and id(leaf) in self._with_old:
                plan.replaced.append((prior, gradient))
                plan.assigned.append((leaf, prior))
                continue
            total = None if gradient is None else _sum_that_allocates(prior, gradient)
            # a sparse gradient cannot become dense in its own object
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
    """Return the sum, where adding in place would allocate; two dense ones are added later.

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


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the graphs of ``roots``, each once; of a root that is a leaf, itself.

    A graph that a node makes only while it runs backward (reentrant checkpoints) is not seen.
    """
    roots = list(roots)
    leaves = {id(root): root for root in roots if root.grad_fn is None and root.requires_grad}
    for node in nodes_of(roots):
        # `AccumulateGrad` alone has a `variable` and nothing below it
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
    return list(leaves.values())


def nodes_of(roots: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graphs of ``roots``, each once."""
    waiting = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn is not None))
    found, seen = [], set(waiting)
    while waiting:
        node: Any = waiting.pop()
        found.append(node)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return found


class _HeldHooks:
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
