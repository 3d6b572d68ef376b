"""The calls of modules, and of their entry points, on the stack of a thread.

Invariant: a call is known by the id of its frame, and no frame is kept: one that is held holds its
tensors. An id counts as that call only while a frame of such code has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import nn

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CALLS: dict[CodeType, str] = {nn.Module._call_impl.__code__: "self"}
"""The code that calls a module, and which of its variables is the module."""
_SAVE = nn.Module._save_to_state_dict.__code__


def calls(variable: str) -> Callable[[_Function], _Function]:
    """Have a function count as a call of the module that one of its variables is."""

    def mark(function: _Function) -> _Function:
        _CALLS[function.__code__] = variable
        return function

    return mark


def calls_of(module: nn.Module) -> Iterator[int]:
    """The calls of a module on this thread's stack, the innermost first; none if it is compiled."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        variable = _CALLS.get(frame.f_code)
        if variable is not None and frame.f_locals.get(variable) is module:
            yield id(frame)
        frame = frame.f_back


def is_running(call: int, frame: FrameType | None) -> bool:
    """Whether a call is on the stack that a frame ends; None is that of a thread that ended."""
    while frame is not None and not (id(frame) == call and frame.f_code in _CALLS):
        frame = frame.f_back
    return frame is not None


def is_saving(frame: FrameType) -> bool:
    """Whether a frame is that of a module that enters its own tensors into a state dict."""
    return frame.f_code is _SAVE


def works() -> bool:
    """Whether this torch calls and saves modules where we look."""
    seen: list[bool] = []

    class Seen(dict[str, Any]):
        def items(self) -> Any:
            seen.append(is_saving(sys._getframe(1)))
            return super().items()

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(list(calls_of(self))) == 1)
            return x

    module = Looking()
    module(torch.ones(1))
    vars(module)["_parameters"] = Seen()
    module.state_dict()
    return seen == [True, True]
