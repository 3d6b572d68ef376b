"""Modules that wait for other ranks when they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import nn

from tenure._torch.replicas import buckets_kept, reset_reducer

_FIRST = "FullyShardedDataParallel"
"""The first version of FSDP."""
Replicated = nn.parallel.DistributedDataParallel


def is_sharded(module: nn.Module) -> bool:
    """Return whether it has shards of its parameters, and gathers the rest when it runs."""
    # by name: the second version of FSDP makes a class for each module that it shards
    return _is_named(module, "FSDP") or is_first_fsdp(module)


def is_first_fsdp(module: nn.Module) -> bool:
    """Return whether it is a module of the first version of FSDP."""
    return _is_named(module, _FIRST)


def has_other_replicas(module: nn.Module) -> TypeGuard[Replicated]:
    """Return whether it is a replica, and other ranks have others."""
    if not isinstance(module, Replicated):
        return False
    return bool(torch.distributed.get_world_size(module.process_group) > 1)


@contextmanager
def kept_apart(module: Replicated) -> Iterator[None]:
    """Return a block in which a replica asks no other rank, whatever these do meanwhile."""
    brings_buffers, exchanges = module.require_forward_param_sync, module.require_backward_grad_sync
    # forward passes ask for buffers, and each one without exchange says that none are to be asked
    module.require_forward_param_sync = False
    try:
        with module.no_sync(), buckets_kept(module):
            yield
    finally:
        module.require_forward_param_sync = brings_buffers
        # it has noted which parameters were used, and would wait for their gradients in the next
        # plain pass; in a block of the user's with no_sync() that is right
        if module.find_unused_parameters and exchanges:
            reset_reducer(module)


def _is_named(module: nn.Module, part: str) -> bool:
    return any(part in kind.__name__ for kind in type(module).__mro__)
