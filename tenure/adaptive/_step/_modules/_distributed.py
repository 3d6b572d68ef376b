"""Modules that talk to other processes when they run, so that one process alone can't split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tenure._errors import AdaptiveUsageError
from tenure._text import listed

from ._module_names import named_modules


def refuse_distributed(roots: Mapping[str, nn.Module], n_samples: int, size: int) -> None:
    """Make sure that a split of this process alone leaves no other waiting.

    Raises:
        AdaptiveUsageError: a module talks to other processes when it runs.
    """
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() < 2:
        return
    talking = [
        f"{name} ({type(module).__name__})"
        for name, module in named_modules(roots)
        if isinstance(module, nn.parallel.DistributedDataParallel)
        or any(
            "FSDP" in kind.__name__ or "FullySharded" in kind.__name__ for kind in _kinds(module)
        )
    ]
    if talking:
        raise AdaptiveUsageError(
            f"The batch of {n_samples} has to be split into micro-batches of {size} on this rank, "
            f"and {listed(talking, most=6)} exchanges gradients with the other ranks at each "
            "backward pass: ranks that split differently wait for each other, or get wrong "
            "gradients. Nothing was changed. Pass a batch that fits on every rank."
        )


def _kinds(module: nn.Module) -> tuple[type, ...]:
    return type(module).__mro__
