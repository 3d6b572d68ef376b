"""The buffers of modules, such as running statistics, that a failed attempt has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._torch_versions import version_of, write_back
from tenure.scopes import persist

from .._torch_dispatch import without_functions
from ._modules import modules_below


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor | None
    version: int | None
    copy: Tensor | None


class BufferState:
    """Every buffer of some modules, those below them included: its values, and which tensor it is.

    Costs a copy of each buffer: torch does not tell which have changed, batch norm writes its
    running statistics without counting a version. Buffers that were not there are taken away.

    Args:
        modules: the modules, or models, that the work runs.
    """

    __slots__ = ("_buffers", "_modules", "_names")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules_below(modules)
        self._buffers: list[_Buffer] = []
        self._names: list[tuple[nn.Module, frozenset[str]]] = []

    def begin(self) -> None:
        """Copy the buffers."""
        self._buffers = []  # the copies of the attempt before go first
        self._names = [(module, frozenset(module._buffers.keys())) for module in self._modules]
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
        self._buffers, self._names = [], []

    def written(self) -> list[tuple[nn.Module, str]]:
        """The buffers, by module and name, that have other values than when they were noted.

        One that has another shape is a cache that grew, and does not count.
        """
        with without_functions():
            return [
                (module, name)
                for module, name, before, version, copy in self._buffers
                if before is not None
                and copy is not None
                and _was_written(_buffer(module, name), before, version, copy)
            ]

    def undo(self) -> None:
        """Write back the values, and put back the tensors, that are no longer there."""
        for module, names in self._names:
            for name in set(module._buffers.keys()) - names:
                delattr(module, name)
        for module, name, tensor, version, copy in self._buffers:
            module._buffers[name] = tensor
            if tensor is not None and copy is not None:
                write_back(tensor, copy, version)


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    buffers = module._buffers  # of a scripted module, a mapping without get()
    return buffers[name] if name in buffers else None  # noqa: SIM401


def _was_written(now: Tensor | None, before: Tensor, version: int | None, copy: Tensor) -> bool:
    if now is None:
        return False
    if now is not before:
        return now.shape == before.shape and not _same(now, before)
    if version is not None and version_of(now) != version:
        return True
    is_statistic = type(now) is Tensor and now.is_floating_point() and not now.is_meta
    if not is_statistic or now.layout is not torch.strided:  # batch norm writes no others
        return False
    return not torch.allclose(now, copy, 0.0, 0.0, equal_nan=True)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _noted(module: nn.Module, name: str, tensor: Tensor | None) -> _Buffer:
    if tensor is None:
        return _Buffer(module, name, None, None, None)
    return _Buffer(module, name, tensor, version_of(tensor), tensor.detach().clone())
