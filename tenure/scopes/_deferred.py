"""Disposals that have to wait because torch is in the middle of an operation.

A hook runs inside the operation (or the backward pass) that called it, and the operation may still
need the very handle that the hook disposes. Such a disposal is noted weakly and done at the next
scope event outside.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from tenure._torch.autograd import ENGINE_CODE, check_engine_is_seen

from ._disposal import dispose_tensor
from ._ledger import Reference, site_of
from ._tracker import HANDLER_CODE

if TYPE_CHECKING:
    from ._disposed import Cause


class DeferredDisposals:
    """The disposals of one thread that wait for the running operation to end."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[tuple[Reference, Cause]] = []

    def add(self, reference: Reference, cause: Cause) -> None:
        """Dispose this tensor later, if it is still alive then."""
        self.waiting.append((reference, cause))

    def run(self) -> None:
        """Do what waits, unless an operation still runs."""
        if inside_operation(None):
            return
        waiting, self.waiting = self.waiting, []
        for reference, cause in waiting:
            tensor = reference()
            if tensor is not None:
                dispose_tensor(tensor, cause, site_of(reference))


def inside_operation(opener: tuple[CodeType, int, int] | None) -> bool:
    """Whether the caller runs inside a torch operation that began after ``opener``.

    Args:
        opener: code, instruction and identity of the frame that opened a scope. What that scope
            owns is younger than an operation that runs around it, and need not wait for that one.
    """
    if ENGINE_CODE is None:
        check_engine_is_seen(now=True)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if opener is not None and code is opener[0] and id(frame) == opener[2]:
            return False
        if code is HANDLER_CODE or code is ENGINE_CODE:
            return True
        frame = frame.f_back
    return False
