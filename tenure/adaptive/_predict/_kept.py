"""Containers and settings of torch as they were before work ran on tensors without data.

Invariant: a container that nothing was put into or taken from is not touched, so that a thread that
reads it meanwhile, as one that calls a module, is not disturbed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
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


def _set_device(device: torch.device) -> None:
    # that of the host is the default without any
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cuda", *([] if accelerator is None else [accelerator.type])}
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted(kinds)
    ]


def _set_autocast(values: list[tuple[str, bool, torch.dtype]]) -> None:
    for kind, is_enabled, dtype in values:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_device, _set_device),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (_autocast, _set_autocast),
)
"""The settings of torch: what reads each, and what sets it."""


@contextmanager
def settings_kept() -> Iterator[None]:
    """Return a block after which these are as they were.

    Default device and type, whether gradients are recorded, anomaly detection, deterministic
    algorithms, and autocast of the CPU, of CUDA and of the accelerator of this machine.
    """
    before = [read() for read, _ in _SETTINGS]
    try:
        yield
    finally:
        # only what differs: setting the default device makes a mode of it
        for (read, put_back), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                put_back(value)
