"""The plain attributes of modules, as caches and counters, that a failed attempt has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ._modules import modules_below

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_Container = dict[Any, Any] | list[Any]


class _Noted(NamedTuple):
    module: nn.Module
    attributes: dict[str, Any]
    contents: list[tuple[_Container, _Container]]


class AttributeState:
    """What the attributes of some modules hold, those below them included.

    A tensor that a failed attempt keeps on a module, as a cache for calls to come, is let go with
    the attempt: the attribute gets back what it held, and so do the numbers beside it. Dicts and
    lists get their items back. Modules of torch's own classes keep nothing there, and are left out.

    Args:
        modules: the modules, or models, that the work runs.
    """

    __slots__ = ("_modules", "_noted")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        below = modules_below(modules)
        self._modules = [module for module in below if not _is_of_torch(type(module))]
        self._noted: list[_Noted] = []

    def begin(self) -> None:
        """Note them."""
        self._noted = [_note(module) for module in self._modules]

    def finish(self) -> None:
        """What the attempt set stays."""
        self._noted = []

    def undo(self) -> None:
        """Put back what is no longer there, and take away what is new."""
        for module, attributes, contents in self._noted:
            space = vars(module)
            for name in space.keys() - attributes.keys() - _OF_EVERY_MODULE:
                del space[name]
            space.update(attributes)
            for container, items in contents:
                container.clear()
                if isinstance(container, dict):
                    container.update(items)
                else:
                    container.extend(items)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides what every module has."""
    return {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}


def _note(module: nn.Module) -> _Noted:
    attributes = attributes_of(module)
    contents: list[tuple[_Container, _Container]] = [
        (value, value.copy()) for value in attributes.values() if isinstance(value, dict | list)
    ]
    return _Noted(module, attributes, contents)


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"
