"""How optimizers step: many parameters at once, as by default on accelerators; hooks; scalers.

`torch.amp.GradScaler` copies its scale to where the gradients are without waiting, and computes
with the copy at once. On a device that is in order; the host would read pinned memory that the copy
has not reached yet, and fused optimizers there do the same with the scale that they are given.
While a model is paged for training, such a copy is there when it is read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor

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
    """Return a block that calls a function after each step, before the step's hooks."""

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
    """Return a block in which optimizers choose for tensors without data as they do for real ones.

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


# --- scalers of gradients, whose scale is on a device while gradients are on the host

_REPLICATOR = "torch.amp.grad_scaler._MultiDeviceReplicator"
_get: Any = bound(f"{_REPLICATOR}.get", "training paged models")


def wait_while(owner: object) -> weakref.finalize[[], object]:
    """Have scalers wait for copies to the host until what is returned is called.

    Args:
        owner: with its end they wait no longer either.

    Raises:
        MissingTorchNameError: torch has no such copies any more.
    """
    require(_get)
    return _copies.last_while(owner)


def bring_scale_home(optimizer: torch.optim.Optimizer) -> None:
    """Copy the scale that a fused optimizer is about to use to the host, if it steps there.

    Args:
        optimizer: a scaler has set ``grad_scale`` and ``found_inf`` of it, or nobody has.
    """
    for name in ("grad_scale", "found_inf"):
        given = getattr(optimizer, name, None)
        if _is_elsewhere(given) and _steps_at_home(optimizer):
            setattr(optimizer, name, given.cpu())


def _steps_at_home(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


def _is_elsewhere(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _waiting(get: Any) -> Any:
    @functools.wraps(get)
    def get_and_wait(self: Any, device: torch.device) -> Tensor:
        copied: Tensor = get(self, device)
        if copied.device.type == "cpu" and _is_elsewhere(self.master):
            # Synchronization strategy: the copy runs on this stream, and the host reads it next.
            source = self.master.device
            torch.get_device_module(source).current_stream(source).synchronize()
        return copied

    return get_and_wait


_copies = Patch(_REPLICATOR, {"get": _waiting})
