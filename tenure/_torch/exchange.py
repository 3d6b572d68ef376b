"""What torch keeps to itself of modules that exchange gradients with other processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import refuse

_PURPOSE = "step() with modules that exchange gradients"
_RESET = "_C._distributed_c10d.Reducer._reset_state"
_SHARDED = "distributed.fsdp.FSDPModule._get_fsdp_state"


def reset_reducer(module: nn.parallel.DistributedDataParallel) -> None:
    """Let a module run forward whose last backward pass was broken off, and begin anew."""
    reset = getattr(module.reducer, "_reset_state", None)
    if reset is None:
        refuse(f"torch.{_RESET}", _PURPOSE)
    # both, as where torch changes the group of a module: buckets are built by the order of a whole
    # backward pass
    module._has_rebuilt_buckets = False
    reset()


class ShardedGroup:
    """Parameters of a module of ``fully_shard`` that are exchanged together."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def exchanges(self) -> tuple[bool, bool]:
        """Whether the next backward pass reduces gradients, and whether over all replicas."""
        return self._group.reduce_grads, self._group.all_reduce_grads

    @exchanges.setter
    def exchanges(self, both: tuple[bool, bool]) -> None:
        self._group.reduce_grads, self._group.all_reduce_grads = both

    @property
    def has_unexchanged(self) -> bool:
        """Whether gradients of a backward pass without exchange wait for one with it."""
        for each in self._group.fsdp_params:
            # made by the first forward pass
            whole = getattr(each, "_unsharded_param", None)
            waiting = each.unsharded_accumulated_grad is not None
            if waiting or (whole is not None and whole.grad is not None):
                return True
        return False

    def drop_unexchanged(self) -> None:
        """Forget such gradients."""
        for each in self._group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if getattr(each, "_unsharded_param", None) is not None:
                each._unsharded_param.grad = None


def sharded_groups(module: nn.Module) -> list[ShardedGroup]:
    """Those of one module; none if it is not sharded by ``fully_shard``."""
    # of the class: a module looks for what it has not in all its parts
    if not hasattr(type(module), "set_requires_gradient_sync"):
        return []
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        refuse(f"torch.{_SHARDED}()._fsdp_param_groups", _PURPOSE)
    return [ShardedGroup(group) for group in groups]


def works() -> bool:
    """Whether reducers can be reset; groups are tried where there are processes."""
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return True
    return hasattr(distributed.Reducer, "_reset_state")
