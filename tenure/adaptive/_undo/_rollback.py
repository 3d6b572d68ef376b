"""What an attempt may change besides making tensors, and how a failed one is undone.

Invariant: between ``begin`` and the end of an attempt, ``undo`` brings back what was there at
``begin``, however far the attempt came, and allocates no device memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class GradMode:
    """Whether gradients are on: an interrupt at the end of a ``no_grad`` block leaves them off."""

    __slots__ = ("_is_on",)

    def __init__(self) -> None:
        self._is_on = torch.is_grad_enabled()

    def begin(self) -> None:
        """Note it."""
        self._is_on = torch.is_grad_enabled()

    def finish(self) -> None:
        """Do nothing: it is done already."""

    def undo(self) -> None:
        """Set it as it was."""
        torch.set_grad_enabled(self._is_on)


class AllOf:
    """Several kinds of state as one; the last noted is the first undone."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Iterable[Rollback]) -> None:
        self._parts: Sequence[Rollback] = tuple(parts)

    def begin(self) -> None:
        """Note each state; if one fails, those noted before it are brought back."""
        with ExitStack() as begun:
            # a state may run out of memory while it is noted, as copies of buffers do
            for part in self._parts:
                part.begin()
                begun.callback(part.undo)
            begun.pop_all()

    def finish(self) -> None:
        """Let each make its change last."""
        for part in self._parts:
            part.finish()

    def undo(self) -> None:
        """Bring each state back, whatever becomes of another."""
        # half of a state brought back is worse than none, and harder to see
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.undo)
