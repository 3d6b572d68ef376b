"""Gradients that were made before their time: the backward pass of a loss delivers them later.

Lightning runs `training_step`, then `zero_grad`, then the backward pass of what `training_step`
returned. Invariant: until that pass the gradients, and the hooks of the leaves, are what they were
before; in it autograd adds each new gradient, times the gradient that comes to the loss, and runs
those hooks, once, as if the loss had just been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import Token
from typing import Any, TypeVar

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._registries import gradients_aside
from tenure._torch.autograd import hooks_of, post_hooks_of

T = TypeVar("T")
_Hooks = dict[int, Callable[..., Any]]


class DeferredGradients:
    """Work that makes gradients, and what delivers them after it.

    Args:
        leaves: whose gradients are kept for later; those of others are not touched.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._before: list[Tensor | None] = []
        self._hooks: list[tuple[_Hooks, _Hooks]] = []
        self._new: list[tuple[Tensor, Tensor]] = []
        self._token: Token[bool] | None = None

    def making(self, work: Callable[[], T]) -> T:
        """Run what makes gradients, and keep them."""
        # no context manager: Ctrl-C may come as its end begins, and hooks would be gone for good
        try:
            self._set_aside()
            result = work()
            self._new = [(leaf, leaf.grad) for leaf in self._leaves if leaf.grad is not None]
        finally:
            try:
                self._bring_back()
            except KeyboardInterrupt:
                # in the middle of that: from the beginning
                self._bring_back()
                raise
        self._before, self._hooks = [], []
        return result

    def _set_aside(self) -> None:
        self._before = [leaf.grad for leaf in self._leaves]
        # where gradients accumulate, less memory is free than where there are none
        self._token = gradients_aside.set(any(each is not None for each in self._before))
        for leaf in self._leaves:
            leaf.grad = None
            found: Any = hooks_of(leaf), post_hooks_of(leaf)
            for hooks in filter(None, found):
                self._hooks.append((hooks, dict(hooks)))
                # in the same dict, which autograd of C++ and removable handles hold
                hooks.clear()

    def _bring_back(self) -> None:
        """Give leaves what they had; once more changes nothing."""
        token, self._token = self._token, None
        if token is not None:
            gradients_aside.reset(token)
        # none, where the interrupt came before they were known
        for leaf, before in zip(self._leaves, self._before, strict=False):
            leaf.grad = before
        for hooks, held in self._hooks:
            # the order of a dict is the order in which hooks run
            added_meanwhile = dict(hooks)
            hooks.clear()
            hooks.update(held | added_meanwhile)

    def loss(self, value: Tensor, scale: Tensor | None) -> Tensor:
        """Return a loss with that value, whose backward pass delivers what was made.

        Args:
            value: of no dimension.
            scale: what the gradients that were made are multiplied by already; None for 1.
        """
        leaves = [leaf for leaf, _ in self._new]
        gradients = [gradient for _, gradient in self._new]
        self._new = []
        loss: Tensor = _DeliverGradients.apply(value, scale, gradients, *leaves)  # type: ignore[no-untyped-call]
        return loss


class _DeliverGradients(torch.autograd.Function):
    """The node of a graph that hands gradients out instead of computing them."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, scale: Tensor | None, gradients: list[Tensor], *leaves: Tensor
    ) -> Tensor:
        ctx.scale, ctx.gradients = scale, gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        # taken, so that autograd holds the only reference and stores them without a copy
        gradients, ctx.gradients = ctx.gradients, None
        # gradients are on here for who wants to differentiate once more
        if gradients is None or torch.is_grad_enabled():
            raise AdaptiveUsageError(
                "The loss of an AdaptiveMixin runs backward once, without create_graph=True: its "
                "gradients were made before, and there is no graph of them. Compute what needs "
                "more in training_step, or leave AdaptiveMixin out."
            )
        (seed,) = grad_outputs
        factor = seed if ctx.scale is None else seed / ctx.scale
        # reading it on a device would make the host wait for all that was started there
        if factor.device.type != "cpu" or factor != 1:
            devices = {gradient.device for gradient in gradients}
            factors = {device: factor.to(device) for device in devices}
            for gradient in gradients:
                gradient.mul_(factors[gradient.device])
        return None, None, None, *gradients
