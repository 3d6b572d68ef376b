"""All that a failed attempt changes in modules, noted and brought back together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tenure._torch.quiet import without_functions

from ._attribute_state import AttributeState
from ._buffer_state import BufferState
from ._rollback import AllOf

_Hooks = dict[int, Any]
_NO_HOOKS: _Hooks = {}


class ModuleState(AllOf):
    """Attributes and buffers of some modules, and how they are set.

    Args:
        modules: all modules that the work runs, those below others too; what is added to them
            later counts from the next ``begin`` on, and `add` notes it at once.
        with_modes: whether how they are set is noted as well.

    Attributes:
        buffers: the buffers.
    """

    __slots__ = ("_kinds", "buffers")

    def __init__(self, modules: Iterable[nn.Module], *, with_modes: bool = True) -> None:
        self.buffers = BufferState(modules)
        kinds = (AttributeState(modules), self.buffers)
        self._kinds = (ModeState(modules), *kinds) if with_modes else kinds
        super().__init__(self._kinds)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note more modules, while an attempt is on its way and before they run in it."""
        for kind in self._kinds:
            kind.add(modules)


class ModeState:
    """How some modules are set.

    That is training or evaluation, the hooks of forward passes, and which parameters get gradients.
    A function that sets one and puts it back at its end doesn't, if it runs out of memory between.

    Args:
        modules: the modules that the work runs.
    """

    __slots__ = ("_frozen", "_hooks", "_modules", "_training")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self.finish()

    def begin(self) -> None:
        """Note them."""
        self.finish()
        self.add(self._modules)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note more of them."""
        with without_functions():  # a mode would see each attribute of a tensor that is read
            for module in modules:
                self._note(module)

    def _note(self, module: nn.Module) -> None:
        self._training.append((module, module.training))
        pre_hooks, hooks = module._forward_pre_hooks, module._forward_hooks
        self._hooks.append((pre_hooks, pre_hooks.copy() if pre_hooks else _NO_HOOKS))
        self._hooks.append((hooks, hooks.copy() if hooks else _NO_HOOKS))
        if module._parameters:
            self._frozen += [
                (p, p.requires_grad) for p in module._parameters.values() if p is not None
            ]

    def finish(self) -> None:
        """What the attempt set stays."""
        self._training: list[tuple[nn.Module, bool]] = []
        self._hooks: list[tuple[_Hooks, _Hooks]] = []
        self._frozen: list[tuple[Tensor, bool]] = []

    def undo(self) -> None:
        """Set them as they were."""
        for module, training in self._training:
            if module.training != training:
                module.training = training
        for hooks, noted in self._hooks:
            if hooks.keys() != noted.keys():
                hooks.clear()
                hooks.update(noted)
        for parameter, requires_grad in self._frozen:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


def modules_below(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The models and all modules below them, each once, the upper ones first."""
    found: dict[int, nn.Module] = {}
    waiting = [*models][::-1]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            below = module._modules
            if below:
                waiting += [child for child in below.values() if child is not None][::-1]
    return list(found.values())
