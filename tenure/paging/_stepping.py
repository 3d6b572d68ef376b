"""An optimizer's step, part by part, while the backward pass that computes its gradients runs.

Invariant: each parameter is stepped once, with its whole gradient, when no node of the pass needs
it any more: autograd adds its gradient up after the last of them. What is left then is stepped
when the block ends, by the one call of ``optimizer.step()``, which runs the hooks of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn, optim

from tenure._errors import PagingError
from tenure._torch.optimizers import before_post_hooks, pre_hooks_of, unhooked_step

from ._tensors import HostTensor, Unit

_TOGETHER = (optim.LBFGS,)
"""Those whose step looks at all parameters at once."""


class Stepping:
    """Steps parameters of units as soon as all of a unit have their gradients.

    Args:
        optimizer: the optimizer.
        units: the model's.
        prepare: waits until the optimizer may write; called before each part.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        units: Sequence[Unit],
        prepare: Callable[[optim.Optimizer], object],
    ) -> None:
        self._optimizer, self._prepare = optimizer, prepare
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
        """Open a block for the backward pass; if it ends without an error, step the rest."""
        with ExitStack() as hooks:
            for hosts in {id(hosts): hosts for hosts in self._unit_of.values()}.values():
                self._left |= {id(host.tensor) for host in hosts}
                for host in hosts:
                    handle = host.tensor.register_post_accumulate_grad_hook(self._arrived)
                    hooks.callback(handle.remove)
            yield
        groups = self._optimizer.param_groups
        rest = {id(p) for group in groups for p in group["params"]} - self._stepped
        with ExitStack() as narrowed:
            narrowed.enter_context(self._only(rest))
            # Hooks that run after the step see all parameters in the optimizer.
            with before_post_hooks(self._optimizer, narrowed.close):
                self._optimizer.step()

    def _arrived(self, parameter: Tensor) -> None:
        if id(parameter) in self._stepped:
            raise PagingError(
                "A second backward pass has added to gradients that optimizer_step() has stepped "
                "with already. Put the block around the last backward pass of a step alone."
            )
        self._left.discard(id(parameter))
        hosts = self._unit_of[id(parameter)]
        if not any(id(host.tensor) in self._left for host in hosts):
            known = {id(host.tensor) for host in hosts}
            self._stepped |= known
            self._prepare(self._optimizer)
            # as outside of a backward pass, where hooks of gradients run with them or without
            with self._only(known), torch.enable_grad():
                unhooked_step(self._optimizer)

    @contextmanager
    def _only(self, known: set[int]) -> Iterator[None]:
        """Open a block in which the optimizer has only these parameters, given by ``id``."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in known]
            yield
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


@contextmanager
def stepped_after(optimizer: optim.Optimizer, max_norm: float | None) -> Iterator[None]:
    """Open a block after which all parameters are stepped; with a norm, clip before."""
    yield
    if max_norm is not None:
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], max_norm
        )
    optimizer.step()


def needs_all_gradients(optimizer: optim.Optimizer) -> bool:
    """Return whether a hook runs before a step: it may look at any gradient, or refuse the step.

    Hooks of paged models look at none.
    """
    home = __name__.rpartition(".")[0]
    hooks = pre_hooks_of(optimizer)
    return any(not str(getattr(hook, "__module__", "")).startswith(home) for hook in hooks)


def checked_optimizer(optimizer: object) -> optim.Optimizer:
    """Return an optimizer that treats each parameter alone.

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
