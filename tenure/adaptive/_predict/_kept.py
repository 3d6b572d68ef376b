"""Containers as they were before work ran on tensors without data.

Invariant: a container that nothing was put into or taken from is not touched, so that a thread that
reads it meanwhile, as one that calls a module, is not disturbed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .._undo import ContainerNote, noted_container

_LEAVES = (Tensor, nn.Module, Optimizer)
_MOST_ITEMS = 100_000
"""In a container that is looked into: a data set is not."""


class Containers:
    """Dicts, lists, sets and deques, and those within them, with the objects that they hold.

    Args:
        outermost: those to begin with; what modules and optimizers in them hold is not noted.
    """

    def __init__(self, outermost: Iterable[Any]) -> None:
        self._notes: list[ContainerNote] = []
        # what is noted is kept, so an id stands for one object
        seen: dict[int, Any] = {}
        waiting = [*outermost]
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, _LEAVES):
                continue
            if issubclass(type(value), tuple):
                seen[id(value)] = value
                waiting += tuple.__iter__(value)
            elif (note := noted_container(value)) is not None:
                seen[id(value)] = value
                self._notes.append(note)
                if len(note.items) <= _MOST_ITEMS:
                    waiting += note.items.values() if isinstance(note.items, dict) else note.items

    def begin(self) -> None:
        """Note them."""

    def finish(self) -> None:
        """Keep what was put into them."""
        self._notes = []

    def undo(self) -> None:
        """Put back what was in them, into the same ones."""
        for note in self._notes:
            if not note.is_same():
                note.undo()


def holders_in(values: Iterable[Any]) -> list[Any]:
    """Return the containers among some values, and the attribute dicts of objects among them.

    Of a module that is also which parameters, modules and hooks it has; of an optimizer, a schedule
    or a scaler all that it counts.
    """
    found = []
    for value in values:
        if isinstance(value, Tensor | type | ModuleType | FunctionType):
            continue
        if isinstance(value, dict | list | set | deque):
            found.append(value)
        space = getattr(value, "__dict__", None)
        if isinstance(space, dict):
            found.append(space)
    return found
