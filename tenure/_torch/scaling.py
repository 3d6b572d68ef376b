"""Scalers of gradients whose scale is on a device, while gradients are on the host.

`torch.amp.GradScaler` copies its scale to where the gradients are without waiting, and computes
with the copy at once. On a device that is in order; the host would read pinned memory that the copy
has not reached yet, and fused optimizers there do the same with the scale that they are given.

Invariant: while a model is paged for training, what comes to the host so is there when it is read.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeGuard

import torch
from torch import Tensor, optim

from . import bound, require
from .patches import Patch

_HOME = "torch.amp.grad_scaler._MultiDeviceReplicator"
_get: Any = bound(f"{_HOME}.get", "training paged models")


def wait_while(owner: object) -> weakref.finalize[[], object]:
    """Have scalers wait for copies to the host until what is returned is called.

    Args:
        owner: with its end they wait no longer either.

    Raises:
        MissingTorchNameError: torch has no such copies any more.
    """
    require(_get)
    return _copies.last_while(owner)


def bring_scale_home(optimizer: optim.Optimizer) -> None:
    """Copy the scale that a fused optimizer is about to use to the host, if it steps there.

    Args:
        optimizer: a scaler has set ``grad_scale`` and ``found_inf`` of it, or nobody has.
    """
    for name in ("grad_scale", "found_inf"):
        given = getattr(optimizer, name, None)
        if _is_elsewhere(given) and _steps_at_home(optimizer):
            setattr(optimizer, name, given.cpu())


def _steps_at_home(optimizer: optim.Optimizer) -> bool:
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


_copies = Patch(_HOME, {"get": _waiting})
