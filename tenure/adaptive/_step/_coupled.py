"""Modules that mix the samples of a batch, so that a split one gives other results.

Two ways to tell: by type, before anything runs; and by a buffer that a forward pass of the first
chunk has written, as running statistics, observers and power iterations do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tenure._errors import AdaptiveUsageError, BatchCoupledError

from .._retry import BufferState


class Coupled(NamedTuple):
    """A module that mixes samples."""

    name: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.why})"


def coupled_modules(roots: Mapping[str, nn.Module]) -> list[Coupled]:
    """Those that are known by their type, in the state they are in."""
    found = []
    for name, module in named_modules(roots):
        why = _why_coupled(module)
        if why is not None:
            found.append(Coupled(name, type(module).__name__, why))
    return found


def named_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module at or below the roots, each once, under a name that starts with the root's."""
    seen: set[nn.Module] = set()
    for root_name, root in roots.items():
        for name, module in root.named_modules(memo=seen):
            yield f"{root_name}.{name}" if name else root_name, module


def named_parameters(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the roots, each once."""
    seen: set[int] = set()
    for root_name, root in roots.items():
        for name, parameter in root.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{root_name}.{name}", parameter


def written_modules(roots: Mapping[str, nn.Module], buffers: BufferState) -> list[Coupled]:
    """The modules with a buffer that was written since the buffers were noted."""
    names = {module: name for name, module in named_modules(roots)}
    return [
        Coupled(names[module], type(module).__name__, f"each call updates its buffer {key!r}")
        for module, key in buffers.written()
        if module in names
    ]


def refuse_coupled(found: list[Coupled], n_samples: int, size: int) -> None:
    """Make sure that nothing mixes the samples.

    Raises:
        BatchCoupledError: something does.
    """
    if found:
        raise BatchCoupledError(
            f"The batch of {n_samples} has to be split into micro-batches of {size}, and "
            f"{_listed(list(map(str, found)))} would give other results then. Nothing was "
            "changed. Freeze them with eval(), use LayerNorm or GroupNorm, or accept statistics "
            'of each micro-batch with batchnorm="per_chunk".',
            tuple(each.name for each in found),
        )


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
            f"and {_listed(talking)} exchanges gradients with the other ranks at each backward "
            "pass: ranks that split differently wait for each other, or get wrong gradients. "
            "Nothing was changed. Pass a batch that fits on every rank."
        )


def _why_coupled(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm):
        if module.training:
            return "training with the statistics of its batch"
        has_none = module.running_mean is None
        return "without running statistics, so it uses those of its batch" if has_none else None
    if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        return "training its running statistics"
    return None


def _kinds(module: nn.Module) -> tuple[type, ...]:
    return type(module).__mro__


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
