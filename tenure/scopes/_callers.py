"""Who called torch: the frame behind those of other people's modes.

A torch-function mode above tenure's, such as ``with torch.device("cuda"):``, is called first, and
calls on. Its frames then stand between the handler of tenure and the code that wanted a tensor.
"""

from __future__ import annotations

from types import FrameType

from ._sites import module_of

_HANDLER = "__torch_function__"
# a mode calls torch in its handler, or in a function or two that the handler calls
_REACH = 6
# what ``torch.compiler.disable`` puts around a handler
_WRAPPER = "torch._dynamo."


def maker_of(frame: FrameType) -> FrameType:
    """The frame that called torch, where ``frame`` is the one that called tenure's handler."""
    found = frame
    while (outer := outside_of_mode(found)) is not None:
        found = outer
    return found


def outside_of_mode(frame: FrameType) -> FrameType | None:
    """The frame that called the mode in whose handler ``frame`` runs; None if it runs in none."""
    inner: FrameType | None = frame
    for _ in range(_REACH):
        if inner is None:
            return None
        if inner.f_code.co_name == _HANDLER:
            return _unwrapped(inner.f_back)
        inner = inner.f_back
    return None


def _unwrapped(frame: FrameType | None) -> FrameType | None:
    while frame is not None and module_of(frame).startswith(_WRAPPER):
        frame = frame.f_back
    return frame
