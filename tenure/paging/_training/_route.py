"""The way of a gradient: from the weight that is shown on the device to the parameter on the host.

A parameter leads to `_Arrive`, on the host, and that to `_PageIn`, on the device, whose output is
what a forward is shown. So everything that torch does for a parameter it does for that of the host:
its hooks, its ``grad``, sums of several gradients, ``autograd.grad``.

Invariant: nothing behind `_Arrive`, no hook and no sum, reads a gradient before its copy is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tenure._torch.autograd import is_batch_of_gradients
from tenure._torch.quiet import quietly

from .._model import HostTensor
from ._homeward import Homeward


class Route:
    """One weight on the device, and what waits for its gradients.

    Args:
        host: the weight on the host.
        homeward: takes gradients there.
    """

    __slots__ = ("_event", "_homeward", "_host")

    def __init__(self, host: HostTensor, homeward: Homeward) -> None:
        self._host, self._homeward = host, homeward
        self._event: Any = None

    def alias(self, shown: Tensor) -> Tensor:
        """What a forward is shown: over the bytes and versions of ``shown``, in a graph."""
        # Also where no graph is recorded now: what is read there may be used where one is.
        with quietly(), torch.inference_mode(False), torch.enable_grad():
            arrive: Any = _Arrive.apply
            page_in: Any = _PageIn.apply
            alias: Any = page_in(arrive(self._host.tensor, self), self, (shown,))
        for name, value in vars(shown).items():
            vars(alias).setdefault(name, value)
        # What `isinstance(weight, nn.Parameter)` asks a tensor of another class.
        alias._is_param = True
        return alias  # type: ignore[no-any-return]

    def send(self, gradient: Tensor) -> Tensor:
        """Begin to copy a gradient to the host; what it will be there."""
        there, self._event = self._homeward.send(self._host, gradient)
        if torch.is_anomaly_enabled():
            # It looks at what each node returns.
            self.wait()
        return there

    def wait(self) -> None:
        """Stop the host until the gradient that was sent is there."""
        if self._event is not None:
            self._homeward.wait(self._event)


class _Arrive(Function):
    """The same tensor; its gradient is there when it passes."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, route: Route) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.route = route
        ctx.set_materialize_grads(False)
        return host.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.route.wait()
        return gradient, None


class _PageIn(Function):
    """The weight on the device; its gradient is on its way when it passes."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, route: Route, shown: tuple[Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.route = route
        ctx.set_materialize_grads(False)
        # No view: one of a function's own could not be used after a write in place, as constraints
        # of weights are. It counts writes with the tensor that is shown.
        return shown[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A gradient that is to be differentiated goes by an operation that can be; and so do those
        # of several outputs at once, which are one tensor of vmap's.
        if gradient is None or torch.is_grad_enabled() or is_batch_of_gradients(gradient):
            return None if gradient is None else gradient.cpu(), None, None
        return ctx.route.send(gradient), None, None
