"""An optimizer's step, part by part, while the backward pass that computes its gradients runs.

Invariant: each parameter is stepped once, with its whole gradient, when no node of the pass needs
it any more: autograd adds its gradient up after the last of them. What is left then is stepped
when the block ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn, optim

from tenure._errors import PagingError

from .._model import HostTensor, Unit

_TOGETHER = (optim.LBFGS,)
"""Those whose step looks at all parameters at once."""


class Stepping:
    """Steps parameters of units as soon as all of a unit have their gradients.

    Args:
        optimizer: the optimizer.
        units: the model's.
    """

    def __init__(self, optimizer: optim.Optimizer, units: Sequence[Unit]) -> None:
        self._optimizer = optimizer
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._left: set[int] = set()
        self._unit_of: dict[int, list[HostTensor]] = {}
        for unit in units:
            hosts = [host for host in unit.tensors if id(host.tensor) in own]
            hosts = [host for host in hosts if host.tensor.requires_grad]
            self._unit_of |= {id(host.tensor): hosts for host in hosts}
        self._stepped: set[int] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block around the backward pass; when it ends without an error, all are stepped."""
        with ExitStack() as hooks:
            for hosts in {id(hosts): hosts for hosts in self._unit_of.values()}.values():
                self._left |= {id(host.tensor) for host in hosts}
                for host in hosts:
                    handle = host.tensor.register_post_accumulate_grad_hook(self._arrived)
                    hooks.callback(handle.remove)
            yield
        rest = (p for group in self._optimizer.param_groups for p in group["params"])
        self._step([p for p in rest if id(p) not in self._stepped])

    def _arrived(self, parameter: Tensor) -> None:
        if id(parameter) in self._stepped:
            raise PagingError(
                "A second backward pass has added to gradients that optimizer_step() has stepped "
                "with already. Put the block around the last backward pass of a step alone."
            )
        self._left.discard(id(parameter))
        hosts = self._unit_of[id(parameter)]
        if not any(id(host.tensor) in self._left for host in hosts):
            self._step([host.tensor for host in hosts])

    def _step(self, parameters: list[Tensor]) -> None:
        """The optimizer's step of these alone."""
        self._stepped |= {id(parameter) for parameter in parameters}
        known = {id(parameter) for parameter in parameters}
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in known]
            # as outside of a backward pass, where hooks of gradients run with them or without
            with torch.enable_grad():
                self._optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


@contextmanager
def clipped(optimizer: optim.Optimizer, max_norm: float) -> Iterator[None]:
    """A block after which all gradients are clipped, and all parameters are stepped."""
    yield
    nn.utils.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], max_norm
    )
    optimizer.step()


def checked_optimizer(optimizer: object) -> optim.Optimizer:
    """An optimizer that treats each parameter alone.

    Raises:
        PagingError: it does not, or nobody knows.
    """
    cls = type(optimizer)
    home = cls.__module__.partition(".")
    is_torchs = home[0] == "torch" and not isinstance(optimizer, _TOGETHER)
    if not isinstance(optimizer, optim.Optimizer) or not is_torchs:
        raise PagingError(
            f"optimizer_step() was given {cls.__name__}, which may look at several parameters at "
            "once; only what steps each parameter alone can step a part of them. Call its step() "
            "after the backward pass."
        )
    return optimizer
