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
from torch.nn.parameter import is_lazy

from tenure._errors import AdaptiveUsageError, BatchCoupledError

from .._torch_dispatch import without_functions


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


class WrittenBuffers:
    """Notices buffers that a forward pass writes.

    Args:
        roots: the modules of the step, by name.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._before = [
            (name, module, key, tensor, _version_of(tensor), _copy_of(tensor))
            for name, module in named_modules(roots)
            for key, tensor in module._buffers.items()
            if tensor is not None and not is_lazy(tensor)
        ]

    def found(self) -> list[Coupled]:
        """The modules with a buffer that was written since."""
        return [
            Coupled(name, type(module).__name__, f"each call updates its buffer {key!r}")
            for name, module, key, tensor, version, copy in self._before
            if _was_written(_buffer(module, key), tensor, version, copy)
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


def _buffer(module: nn.Module, key: str) -> Tensor | None:
    buffers = module._buffers  # of a scripted module, a mapping without get()
    return buffers[key] if key in buffers else None  # noqa: SIM401


def _why_coupled(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm):
        if module.training:
            return "training with the statistics of its batch"
        has_none = module.running_mean is None
        return "without running statistics, so it uses those of its batch" if has_none else None
    if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        return "training its running statistics"
    return None


def _copy_of(tensor: Tensor) -> Tensor | None:
    """The values of what ``F.batch_norm`` may write, which counts no version then."""
    is_statistic = type(tensor) is Tensor and tensor.is_floating_point() and not tensor.is_meta
    return tensor.detach().clone() if is_statistic and tensor.layout is torch.strided else None


def _was_written(
    now: Tensor | None, before: Tensor, version: int | None, copy: Tensor | None
) -> bool:
    """Whether a buffer has new values; one of another shape is a cache that grew."""
    if now is None:
        return False
    if now is before:
        if version is not None and _version_of(now) != version:
            return True
        return copy is not None and not torch.allclose(now, copy, 0.0, 0.0, equal_nan=True)
    return now.shape == before.shape and not _same(now, before)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _version_of(tensor: Tensor) -> int | None:
    with without_functions():
        return None if tensor.is_inference() else tensor._version


def _kinds(module: nn.Module) -> tuple[type, ...]:
    return type(module).__mro__


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
