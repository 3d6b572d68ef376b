"""Modules that wait for other ranks when they run."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn

_FIRST = "FullyShardedDataParallel"
"""The first version of FSDP."""
Replicated = nn.parallel.DistributedDataParallel


def is_sharded(module: nn.Module) -> bool:
    """Whether it has a part of its parameters, and asks other ranks for the rest when it runs."""
    # by name: the second version of FSDP makes a class for each module that it shards
    return _is_named(module, "FSDP") or is_first_fsdp(module)


def is_first_fsdp(module: nn.Module) -> bool:
    """Whether it is a module of the first version of FSDP."""
    return _is_named(module, _FIRST)


def has_other_replicas(module: nn.Module) -> TypeGuard[Replicated]:
    """Whether it is a replica, and other ranks have others."""
    if not isinstance(module, Replicated):
        return False
    return bool(torch.distributed.get_world_size(module.process_group) > 1)


def _is_named(module: nn.Module, part: str) -> bool:
    return any(part in kind.__name__ for kind in type(module).__mro__)
