"""Asking tensors questions that no mode, no subclass and no profiler of the user's gets to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def quietly() -> Iterator[None]:
    """A block in which neither modes nor overrides of subclasses run."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, *_: object) -> None:
        raise AssertionError("a quiet block ran a mode")


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, *_: object) -> None:
        raise AssertionError("a quiet block ran a mode")


def works() -> bool:
    """Whether an operation in such a block passes both kinds of mode by."""
    t = torch.ones(1)
    try:
        mode: Any = _DispatchMode
        with _FunctionMode(), mode(), quietly():
            return bool((t + 1).numel() == 1)
    except AssertionError:
        return False
