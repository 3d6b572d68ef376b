"""The buffers of modules, such as running statistics, that a failed attempt has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._torch_versions import version_of, write_back
from tenure.scopes import persist


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor | None
    version: int | None
    copy: Tensor | None


class BufferState:
    """Every buffer of some modules, those below them included: its values, and which tensor it is.

    Costs a copy of each buffer: torch does not tell which have changed, batch norm writes its
    running statistics without counting a version.

    Args:
        modules: the modules, or models, that the work runs.
    """

    __slots__ = ("_buffers", "_modules")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(sub for each in modules for sub in each.modules()))
        self._buffers: list[_Buffer] = []

    def begin(self) -> None:
        """Copy the buffers."""
        self._buffers = []  # the copies of the attempt before go first
        with persist(), torch.no_grad():
            self._buffers = [
                _noted(module, name, tensor)
                for module in self._modules
                for name, tensor in module._buffers.items()
                if tensor is None
                or not is_lazy(tensor)  # a first call that fails may leave it with a shape
            ]

    def finish(self) -> None:
        """What the attempt wrote stays; the copies go."""
        self._buffers = []

    def undo(self) -> None:
        """Write back the values, and put back the tensors, that are no longer there."""
        for module, name, tensor, version, copy in self._buffers:
            module._buffers[name] = tensor
            if tensor is not None and copy is not None:
                write_back(tensor, copy, version)


def _noted(module: nn.Module, name: str, tensor: Tensor | None) -> _Buffer:
    if tensor is None:
        return _Buffer(module, name, None, None, None)
    return _Buffer(module, name, tensor, version_of(tensor), tensor.detach().clone())
