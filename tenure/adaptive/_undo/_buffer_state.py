"""The buffers of modules, such as running statistics, that a failed attempt has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._torch.quiet import without_functions
from tenure.scopes import persist

from ._notes import TensorNote, differing, is_gone, noted, remember_written

_NO_NAMES: frozenset[str] = frozenset()


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor | None
    note: TensorNote | None


class BufferState:
    """Every buffer of some modules: its values, and which tensor it is.

    Buffers that were not there are taken away.

    Args:
        modules: the modules that the work runs.
    """

    __slots__ = ("_buffers", "_modules", "_names")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self._buffers: list[_Buffer] = []
        self._names: list[tuple[nn.Module, frozenset[str]]] = []

    def begin(self) -> None:
        """Note the buffers."""
        self.finish()  # the copies of the attempt before go first
        self.add(self._modules)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note those of more modules."""
        with persist(), torch.no_grad():
            for module in modules:
                buffers = module._buffers
                if not buffers:
                    self._names.append((module, _NO_NAMES))
                    continue
                self._names.append((module, frozenset(buffers.keys())))
                for name, tensor in buffers.items():
                    # a first call that fails may leave a lazy buffer with a shape
                    if tensor is None or not is_lazy(tensor):
                        note = None
                        if tensor is not None and not is_gone(tensor):
                            note = noted(module, name, tensor)
                        self._buffers.append(_Buffer(module, name, tensor, note))

    def finish(self) -> None:
        """What the attempt wrote stays; the copies go."""
        remember_written(buffer.note for buffer in self._buffers if buffer.note is not None)
        self._buffers, self._names = [], []

    def written(self) -> list[tuple[nn.Module, str]]:
        """The buffers, by module and name, that have other values than when they were noted.

        One that has another shape is a cache that grew, and does not count.
        """
        written: list[_Buffer] = []
        unsure: list[tuple[_Buffer, tuple[Tensor, Tensor]]] = []
        for buffer in self._buffers:
            note, now = buffer.note, _buffer(buffer.module, buffer.name)
            if note is None or now is None:
                continue
            if now is buffer.tensor and note.has_other_version():
                written.append(buffer)
            elif now is buffer.tensor:
                if not note.was_left_alone() and _may_be_statistic(now):
                    unsure.append((buffer, (now, note.copy)))
            elif now.shape == note.copy.shape:
                unsure.append((buffer, (now, note.copy)))
        with without_functions(), torch.no_grad():
            answers = differing([pair for _, pair in unsure])
        written += [buffer for (buffer, _), differs in zip(unsure, answers, strict=True) if differs]
        return [(buffer.module, buffer.name) for buffer in written]

    def undo(self) -> None:
        """Write back the values, and put back the tensors, that are no longer there."""
        for module, names in self._names:
            for name in set(module._buffers.keys()) - names:
                delattr(module, name)
        for module, name, tensor, note in self._buffers:
            module._buffers[name] = tensor
            if note is not None:
                note.undo()


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    buffers = module._buffers  # of a scripted module, a mapping without get()
    return buffers[name] if name in buffers else None  # noqa: SIM401


def _may_be_statistic(tensor: Tensor) -> bool:
    """Whether batch norm may have written it without counting a version."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_plain and tensor.is_floating_point() and not tensor.is_meta
