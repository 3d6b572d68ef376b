"""Leaves in place of tensors that came with a graph, and the gradients that these get.

Invariant: the graph that a tensor came with is run backward once for each backward pass, with the
whole gradient, however often what was recorded of it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tenure.scopes import persist

from ._entry import Leaf

Reached = tuple[Tensor, Tensor]
"""A tensor that came with a graph, and its gradient."""


def has_graph(leaf: Leaf) -> bool:
    """Whether a leaf is the result of a computation that autograd recorded."""
    return leaf.value.grad_fn is not None


def cut_off(leaf: Leaf) -> Leaf:
    """A leaf without the graph that it came with, which gets a gradient of its own."""
    if not has_graph(leaf):
        return leaf
    return leaf._replace(value=leaf.value.detach().requires_grad_())


def is_made_of(tensor: Tensor, values: Iterable[Tensor]) -> bool:
    """Whether the graph of a tensor leads to that of one of some values."""
    wanted = {value.grad_fn for value in values} - {None}
    waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
    while wanted and waiting:
        node: Any = waiting.pop()
        if node in wanted:
            return True
        below = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= below
        waiting += below
    return False


class Proxy:
    """What calls on the whole batch get in place of a tensor that came with a graph.

    Attributes:
        origin: that tensor.
        leaf: the same, with another value.
    """

    def __init__(self, leaf: Leaf) -> None:
        self.origin = leaf.value
        self._slot = slot = _Slot()
        with persist(), torch.inference_mode(False), torch.enable_grad():
            self._cut = cut = cut_off(leaf).value
            # no leaf itself, as the tensor is none: autocast keeps what it casts of leaves
            self.leaf = leaf._replace(value=cut.view_as(cut))
        origin = leaf.value

        def accumulated(cut: Tensor) -> None:
            gradient, cut.grad = cut.grad, None
            if slot.is_open or gradient is None:
                slot.gradient = gradient
                return
            # somebody runs backward what value() gave, maybe again
            torch.autograd.backward(
                origin, gradient, retain_graph=True, create_graph=torch.is_grad_enabled()
            )

        cut.register_post_accumulate_grad_hook(accumulated)

    @property
    def root(self) -> Tensor:
        """What a backward pass has to reach."""
        return self._cut

    def begin(self) -> None:
        """Collect the gradient of a backward pass."""
        self._slot.is_open, self._slot.gradient = True, None

    def take(self) -> list[Reached]:
        """The gradient that came, if one did; later ones are passed on."""
        gradient, self._slot.gradient, self._slot.is_open = self._slot.gradient, None, False
        return [] if gradient is None else [(self.origin, gradient)]


class _Slot:
    """Where a gradient is kept; apart, so that a tensor's hook holds no graph of the tensor."""

    __slots__ = ("gradient", "is_open")

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.is_open = False


def given(
    leaves: Mapping[int, Leaf], proxies: dict[int, Proxy], values: Iterable[Tensor]
) -> dict[int, Leaf]:
    """The leaves as calls get them: cut off the graphs that they came with.

    Args:
        leaves: what calls begin with, by number.
        proxies: those that were made; gets new ones.
        values: what is known already: a leaf that was made of it is of the same graph, which runs
            backward as one.
    """
    found = dict(leaves)
    for number, leaf in leaves.items():
        if number not in proxies and has_graph(leaf) and not is_made_of(leaf.value, values):
            proxies[number] = Proxy(leaf)
        if number in proxies:
            found[number] = proxies[number].leaf
    return found
