"""Programs that name a device which this machine lacks: their work there is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def is_here(kind: str) -> bool:
    """Whether this machine has a device of a kind, such as ``"cuda"``."""
    try:
        module: Any = torch.get_device_module(kind)
        return bool(module.is_available())
    # torch knows no such backend, or not how to ask it
    except (RuntimeError, AttributeError):
        return False


class Elsewhere(TorchFunctionMode):
    """A block in which work on a device that is not here is on another one.

    Below, torch would look for the device's driver. Moves by name, as ``Tensor.cuda()``, leave the
    tensor where it is.

    Args:
        is_missing: whether a kind of device is to be taken for the other one.
        instead: the other one.
        keeps_names: whether a ``torch.device`` that the program makes keeps its name, for whatever
            it asks of that, and becomes the other one where it is used. What is kept longer than
            the block has to be the other one from the start.
    """

    def __init__(
        self, is_missing: Callable[[str], bool], instead: torch.device, *, keeps_names: bool
    ) -> None:
        super().__init__()
        self._is_missing, self._instead, self._keeps_names = is_missing, instead, keeps_names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moved = args and isinstance(args[0], Tensor)
        if moved and self._is_missing(getattr(func, "__name__", "")):
            return args[0]
        if func is torch.device and self._keeps_names:
            return func(*args, **kwargs)
        named = {name: self._here(value) for name, value in kwargs.items()}
        return func(*map(self._here, args), **named)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.device) and self._is_missing(value.type):
            return self._instead
        if isinstance(value, str) and self._is_missing(value.partition(":")[0]):
            return str(self._instead)
        return value
