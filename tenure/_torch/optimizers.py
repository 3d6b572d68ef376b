"""How optimizers step: many parameters at once, as by default on accelerators, and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from . import bound, getter, require
from .fakes import FakeTensor
from .patches import Patch

_PREDICTION = "predictions of memory on an accelerator"
_HOME = "torch.optim.optimizer"
_types: Any = bound(f"{_HOME}._foreach_supported_types", _PREDICTION)
_devices: Any = bound(f"{_HOME}._get_foreach_kernels_supported_devices", _PREDICTION)
_STEPPING = "PagedModel.optimizer_step()"
_global_pre_hooks: Any = bound(f"{_HOME}._global_optimizer_pre_hooks", _STEPPING)
_pre_hooks = getter(f"{_HOME}.Optimizer._optimizer_step_pre_hooks", _STEPPING)
_post_hooks = getter(f"{_HOME}.Optimizer._optimizer_step_post_hooks", _STEPPING)


def pre_hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before a step: those of all optimizers, then its own."""
    return [*_global_pre_hooks.values(), *_pre_hooks(optimizer).values()]


@contextmanager
def before_post_hooks(
    optimizer: torch.optim.Optimizer, function: Callable[[], object]
) -> Iterator[None]:
    """A block in which a function is called after each step, before the hooks that run then."""

    def hook(*_: Any) -> None:
        function()

    handle = optimizer.register_step_post_hook(hook)
    _post_hooks(optimizer).move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()


def cell_of_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return the cell of the function that a step calls between its hooks; None without one."""
    step: Any = type(optimizer).step
    names = getattr(getattr(step, "__code__", None), "co_freevars", ())
    return step.__closure__[names.index("func")] if "func" in names else None


def unhooked_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the step of an optimizer's class, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    step.__wrapped__(optimizer)


@contextmanager
def stepping_fakes(*, cpu_as: str | None) -> Iterator[None]:
    """A block in which optimizers choose for tensors without data as they do for real ones.

    Args:
        cpu_as: the kind of device that fakes of the CPU stand for; None where they are of the CPU.

    Raises:
        MissingTorchNameError: torch has no such choice any more.
    """
    require(_types, _devices)
    _types.append(FakeTensor)
    try:
        with _at_once_on_cpu.block() if cpu_as in _devices() else nullcontext():
            yield
    finally:
        _types.remove(FakeTensor)


# other threads' optimizers ask, too: those of the CPU may step all at once, to the same values
_at_once_on_cpu = Patch(
    _HOME, {"_get_foreach_kernels_supported_devices": lambda ask: lambda: [*ask(), "cpu"]}
)
