"""Whether optimizers step many parameters at once, which they do by default on accelerators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from . import bound, require
from .fakes import FakeTensor

_PREDICTION = "predictions of memory on an accelerator"
_HOME = "torch.optim.optimizer"
_types: Any = bound(f"{_HOME}._foreach_supported_types", _PREDICTION)
_devices: Any = bound(f"{_HOME}._get_foreach_kernels_supported_devices", _PREDICTION)


@contextmanager
def stepping_fakes(*, cpu_as: str | None) -> Iterator[None]:
    """A block in which optimizers choose for tensors without data as they do for real ones.

    Args:
        cpu_as: the kind of device that fakes of the CPU stand for; None where they are of the CPU.

    Raises:
        MissingTorchNameError: torch has no such choice any more.
    """
    require(_types, _devices)
    _types.append(FakeTensor)
    try:
        with _all_at_once_on_cpu() if cpu_as in _devices() else nullcontext():
            yield
    finally:
        _types.remove(FakeTensor)


def _all_at_once_on_cpu() -> AbstractContextManager[Any]:
    # other threads' optimizers ask, too: those of the CPU may step all at once, to the same values
    known = [*_devices(), "cpu"]
    return patch.object(sys.modules[_HOME], _devices.__name__, lambda: known)


def works() -> bool:
    """Whether the lists are those that optimizers ask."""
    return isinstance(_types, list) and torch.Tensor in _types and "cuda" in _devices()
