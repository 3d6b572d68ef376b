"""Whether optimizers step many parameters at once, which they do by default on accelerators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
def stepping_fakes_as_on(device: torch.device) -> Iterator[None]:
    """A block in which optimizers choose for tensors without data as they do for real ones.

    Args:
        device: where those would be: fakes of the CPU are stepped as tensors of this device.

    Raises:
        MissingTorchNameError: torch has no such choice any more.
    """
    require(_types, _devices)
    # Other threads' optimizers ask, too: those of real tensors of an accelerator get the same
    # answer, those of the CPU may step all at once, to the same values.
    known = [*_devices(), "cpu"] if device.type in _devices() else _devices()
    _types.append(FakeTensor)
    try:
        with patch.object(sys.modules[_HOME], _devices.__name__, lambda: known):
            yield
    finally:
        _types.remove(FakeTensor)


def works() -> bool:
    """Whether the lists are those that optimizers ask."""
    return isinstance(_types, list) and torch.Tensor in _types and "cuda" in _devices()
