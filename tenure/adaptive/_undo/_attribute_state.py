"""The plain attributes of modules, as caches and counters, that a failed attempt has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure.scopes import persist

from ._notes import (
    ContainerNote,
    TensorNote,
    entries,
    is_gone,
    noted,
    noted_container,
    remember_written,
)

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device))


class _Noted(NamedTuple):
    module: nn.Module
    attributes: dict[str, Any]


class AttributeState:
    """What the attributes of some modules hold.

    A tensor that a failed attempt keeps on a module, as a cache for calls to come, is let go with
    the attempt: the attribute gets back what it held, and so do the numbers beside it. Dicts,
    lists, sets and deques get their items back, also inside each other, and tensors that were
    written in place their values. Modules of torch's own classes keep nothing there, and are left
    out.

    Args:
        modules: the modules that the work runs.
    """

    __slots__ = ("_contents", "_modules", "_noted", "_seen", "_tensors")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self._noted: list[_Noted] = []
        self._contents: list[ContainerNote] = []
        self._tensors: list[TensorNote] = []
        self._seen: set[int] = set()  # what is noted is kept, so an id stands for one object

    def begin(self) -> None:
        """Note them."""
        self.finish()
        self.add(self._modules)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note those of more modules."""
        with persist(), torch.no_grad():
            for module in modules:
                if not _is_of_torch(type(module).__module__):
                    attributes = _attributes_of(module)
                    self._noted.append(_Noted(module, attributes))
                    self._note_below(module, attributes)

    def finish(self) -> None:
        """What the attempt set stays."""
        remember_written(self._tensors)
        self._noted, self._contents, self._tensors, self._seen = [], [], [], set()

    def undo(self) -> None:
        """Put back what is no longer there, and take away what is new."""
        for module, attributes in self._noted:
            space = vars(module)
            for name in space.keys() - attributes.keys() - _OF_EVERY_MODULE:
                del space[name]
            space.update(attributes)
        for contents in self._contents:
            contents.undo()
        for note in self._tensors:
            note.undo()

    def _note_below(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        waiting = [item for item in attributes.items() if type(item[1]) not in _PLAIN]
        while waiting:
            name, value = waiting.pop()
            if id(value) in self._seen:
                continue
            if issubclass(type(value), Tensor):
                self._seen.add(id(value))
                if not (is_gone(value) or value.requires_grad):
                    self._tensors.append(noted(module, name, value))
            elif issubclass(type(value), tuple):
                self._seen.add(id(value))
                waiting += _changeable(name, tuple.__iter__(value))
            elif (contents := noted_container(value)) is not None:
                self._seen.add(id(value))
                self._contents.append(contents)
                waiting += _changeable(name, contents.items)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides what every module has."""
    return {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}


def _changeable(name: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """What stands in a container and may be changed, with a name for each place."""
    # by number: the text of a key may be that of a whole model, and keys may be others each time
    numbered = enumerate(each for _, each in entries(items))
    return ((f"{name}[{i}]", each) for i, each in numbered if type(each) not in _PLAIN)


def _is_of_torch(name: str) -> bool:
    return name.startswith("torch.") or name == "torch"
