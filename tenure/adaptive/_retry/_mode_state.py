"""What modules and parameters are set to while work runs, and what a failed attempt left set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ._modules import modules_below

_Hooks = dict[int, Any]


class ModeState:
    """How some modules are set, those below them included.

    That is training or evaluation, the hooks of forward passes, and which parameters get gradients.
    A function that sets one and puts it back at its end doesn't, if it runs out of memory between.

    Args:
        modules: the modules, or models, that the work runs.
    """

    __slots__ = ("_frozen", "_hooks", "_modules", "_training")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules_below(modules)
        self._training: list[bool] = []
        self._hooks: list[tuple[_Hooks, _Hooks]] = []
        self._frozen: list[tuple[Tensor, bool]] = []

    def begin(self) -> None:
        """Note them."""
        self._training = [module.training for module in self._modules]
        self._hooks = [
            (hooks, hooks.copy())
            for module in self._modules
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._frozen = [
            (p, p.requires_grad)
            for module in self._modules
            for p in module._parameters.values()
            if p is not None
        ]

    def finish(self) -> None:
        """What the attempt set stays."""
        self._training, self._hooks, self._frozen = [], [], []

    def undo(self) -> None:
        """Set them as they were."""
        for module, training in zip(self._modules, self._training, strict=False):
            if module.training != training:
                module.training = training
        for hooks, noted in self._hooks:
            if hooks.keys() != noted.keys():
                hooks.clear()
                hooks.update(noted)
        for parameter, requires_grad in self._frozen:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
