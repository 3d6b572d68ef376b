"""Modules that mix the samples of a batch, so that a split one gives other results.

Two ways to tell: by type, before anything runs; and by a buffer that a forward pass of the first
chunk has written, as running statistics, observers and power iterations do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from tenure._errors import BatchCoupledError
from tenure._text import listed
from tenure._torch.modules import BatchNorm, InstanceNorm

from ..._undo import BufferState
from ._module_names import named_modules

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""Part of the text of ``_verify_batch_size`` in torch/nn/functional.py."""


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
            f"{listed([*map(str, found)], most=6)} would give other results then. Nothing was "
            "changed. Freeze them with eval(), use LayerNorm or GroupNorm, or accept statistics "
            'of each micro-batch with batchnorm="per_chunk".',
            tuple(each.name for each in found),
        )


def wants_more_samples(error: ValueError) -> bool:
    """Whether a normalization over the samples of a batch got only one, of one value."""
    return _ONE_VALUE in str(error)


def normalizes(error: ValueError, n_samples: int, size: int) -> BatchCoupledError:
    """The error for a function that calls such a normalization itself."""
    return BatchCoupledError(
        f"The batch of {n_samples} has to be split into micro-batches of {size}, and the function "
        f"of step() normalizes over the samples of its batch ({error}), so it would give other "
        "results then. Nothing was changed. Use layer_norm or group_norm, or running statistics "
        "with training=False; or accept statistics of each micro-batch, of 2 or more with "
        'minimum=2 and batchnorm="per_chunk".'
    )


def _why_coupled(module: nn.Module) -> str | None:
    if isinstance(module, BatchNorm):
        if module.training:
            return "training with the statistics of its batch"
        has_none = module.running_mean is None
        return "without running statistics, so it uses those of its batch" if has_none else None
    if isinstance(module, InstanceNorm) and module.training and module.track_running_stats:
        return "training its running statistics"
    return None
