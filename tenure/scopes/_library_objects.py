"""Tensors that belong to a library object and not to the block that happened to make them.

Optimizer state, buffers, a GradScaler's scale and the flat tensors of a distributed wrapper live as
long as their object. They are recognised by who makes them, or by torch's own public hooks.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._callers import module_of, outside_of_mode
from tenure._errors import ScopeUsageError

from ._trees import tensors_in

_LIBRARY_MODULES = (
    "torch.optim",
    "torch.amp",
    "torch.cuda.amp",
    "torch.nn.modules.module",
    "torch.nn.utils.parametriz",
    "torch.nn.utils.prune",
    "torch.nn.utils.spectral_norm",
    "torch.nn.utils.weight_norm",
    "torch.nn.parallel",
    "torch.distributed",
)
# A jagged tensor is made with the help of one that torch makes once and keeps in a global:
# https://github.com/pytorch/pytorch/blob/main/torch/nested/_internal/nested_tensor.py
_KEEPS_WHAT_IT_MAKES = {("torch.nested._internal.nested_tensor", "_nt_view_dummy")}
_COPYING = {"copy", "torch._tensor", "torch.overrides"}
"""The modules whose frames stand between ``copy.deepcopy`` of an object and that of its tensors."""
_CONTAINERS = (list, tuple, dict, deque)


@functools.lru_cache(maxsize=4096)
def is_library_code(module: str, function: str) -> bool:
    """Whether what ``function`` of ``module`` makes belongs to that library, not to the block."""
    return module.startswith(_LIBRARY_MODULES) or (module, function) in _KEEPS_WHAT_IT_MAKES


def copies_library_object(frame: FrameType | None) -> bool:
    """Whether the ``copy.deepcopy`` that runs in ``frame`` is copying a module or an optimizer.

    Its buffers are copied past every hook of torch; the object being copied tells whose they are.
    """
    while frame is not None:
        if module_of(frame) not in _COPYING:
            frame = outside_of_mode(frame)
        elif isinstance(frame.f_locals.get("x"), nn.Module | Optimizer):
            return True
        else:
            frame = frame.f_back
    return False


def install_hooks(release: Callable[[list[Tensor]], object]) -> None:
    """From now on call ``release`` with the tensors that a module or an optimizer makes its own."""

    def on_registration(module: nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            release([tensor])

    def on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        release(_tensors_of(optimizer))

    module_hooks.register_module_buffer_registration_hook(on_registration)
    module_hooks.register_module_parameter_registration_hook(on_registration)
    register_optimizer_step_post_hook(on_step)


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of its state, of its groups (without the parameters) and of its attributes."""
    states = (state.values() for state in optimizer.state.values() if isinstance(state, dict))
    values = [
        *chain.from_iterable(states),
        *(value for group in optimizer.param_groups for value in _without(group, "params")),
        *_without(vars(optimizer), "state", "param_groups"),
    ]
    found = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, _CONTAINERS) and value:
            with suppress(
                ScopeUsageError
            ):  # a step must not fail for an attribute that can't be read
                found += tensors_in((value,))
    return found


def _without(mapping: dict[str, Any], *names: str) -> list[Any]:
    return [value for name, value in mapping.items() if name not in names]
