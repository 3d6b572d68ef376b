"""What an attempt may change besides making tensors, and how a failed one is undone.

Invariant: between ``begin`` and the end of an attempt, ``undo`` brings back what was there at
``begin``, however far the attempt came, and allocates no device memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

import torch


class Rollback(Protocol):
    """One kind of state."""

    def begin(self) -> None:
        """Note the state, right before an attempt."""

    def finish(self) -> None:
        """Make the change of an attempt that returned last; it may fail, and is then undone.

        What allocates comes before what can't be undone.
        """

    def undo(self) -> None:
        """Bring the state back."""


class AllOf:
    """Several kinds of state, and whether gradients are on, as one; undone from last to first."""

    __slots__ = ("_has_gradients", "_parts")

    def __init__(self, parts: Iterable[Rollback]) -> None:
        self._parts = tuple(parts)

    def begin(self) -> None:
        """Note each state; if one fails, those noted before it are brought back."""
        self._has_gradients = torch.is_grad_enabled()
        begun: list[Rollback] = []
        try:
            for part in self._parts:
                part.begin()
                begun.append(part)
        # a state may run out of memory while it is noted, as copies of buffers do
        except BaseException:
            self._undo(begun)
            raise

    def finish(self) -> None:
        """Let each make its change last."""
        for part in self._parts:
            part.finish()

    def undo(self) -> None:
        """Bring each state back, whatever becomes of another."""
        self._undo(self._parts)

    def _undo(self, parts: Iterable[Rollback]) -> None:
        # half of a state brought back is worse than none, and harder to see
        with ExitStack() as stack:
            # last: the others take blocks without gradients, whose end an interrupt may skip
            stack.callback(torch.set_grad_enabled, self._has_gradients)
            for part in parts:
                stack.callback(part.undo)
