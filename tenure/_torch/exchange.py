"""What torch keeps to itself of replicas, and of the groups of processes that they talk in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from . import refuse

_PURPOSE = "step() with a DistributedDataParallel"
_RESET = "_C._distributed_c10d.Reducer._reset_state"


def reset_reducer(module: nn.parallel.DistributedDataParallel) -> None:
    """Let a module run forward whose last backward pass was broken off, and begin anew."""
    reset = getattr(module.reducer, "_reset_state", None)
    if reset is None:
        refuse(f"torch.{_RESET}", _PURPOSE)
    # both, as where torch changes the group of a module: buckets are built by the order of a whole
    # backward pass
    module._has_rebuilt_buckets = False
    reset()


def has_backend_for(group: Any, device: torch.device) -> bool:
    """Whether a process group has collectives for tensors of a device."""
    try:
        return group._get_backend(device) is not None
    # it raises where there is none
    except RuntimeError:
        return False


def timeout_of(group: Any) -> timedelta | None:
    """How long ranks of a process group wait for each other; None where torch does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def rebuild_buckets(module: nn.parallel.DistributedDataParallel) -> None:
    """Let a module put its buckets into the order of its last exchange, if it waits to do so.

    All ranks talk to each other then, and would do so in the next forward pass.
    """
    if module.reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True


def specialities_of(module: nn.parallel.DistributedDataParallel) -> list[str]:
    """What a module was told to do besides averaging gradients after a backward pass."""
    found = {
        "a comm hook": bool(module._comm_hooks)
        or bool(module._get_ddp_logging_data().get("comm_hook"))
        or hasattr(module, "buffer_hook"),
        "static_graph=True": module.static_graph,
        "mixed_precision=": module.mixed_precision is not None,
        "delay_all_reduce_named_params=": bool(module._delay_all_reduce_params),
        "a block of torch's Join": module._join_config.enable,
    }
    return [name for name, is_there in found.items() if is_there]


def exchanged_buffers(module: nn.parallel.DistributedDataParallel) -> list[torch.Tensor]:
    """The buffers that a module brings to all ranks."""
    # buffers may have been replaced
    module._assign_modules_buffers()
    return list(module.modules_buffers)


def works() -> bool:
    """Whether reducers can be reset."""
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return True
    names = ("_reset_state", "_rebuild_buckets")
    devices = hasattr(distributed.ProcessGroup, "_device_types")
    return devices and all(hasattr(distributed.Reducer, name) for name in names)
