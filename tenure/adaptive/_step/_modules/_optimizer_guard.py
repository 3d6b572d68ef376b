"""Keeping optimizers out of work that may run again: what they move can't be put back.

Hooks run where autograd runs them: for the CPU on this thread, for a device on one of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tenure._errors import AdaptiveUsageError


class _Guard(NamedTuple):
    """What a block is called, and the identities of what may not move in it; None: anything."""

    name: str
    parameters: Container[int] | None


class _Thread(threading.local):
    guard: _Guard | None = None


_this_thread = _Thread()
# Autograd's own threads, one for each device, see nothing of what `_this_thread` holds.
_guarded: dict[int, _Guard] = {}
"""The blocks that are open, by thread."""


@contextmanager
def no_optimizer_steps(name: str, parameters: Container[int] | None = None) -> Iterator[None]:
    """A block in which an optimizer that steps on this thread, or in a backward pass of it, raises.

    Args:
        name: what the error calls the block.
        parameters: the identities of those that may not move; None: no optimizer may step.

    Raises:
        AdaptiveUsageError: in the block, from ``optimizer.step()``, before it changes anything.
    """
    _listen()
    guard = _Guard(name, parameters)
    before, _this_thread.guard = _this_thread.guard, guard
    _guarded[threading.get_ident()] = guard
    try:
        yield
    finally:
        _this_thread.guard = before
        # a step inside a step is still inside the outer one
        if before is None:
            del _guarded[threading.get_ident()]


@functools.cache
def _listen() -> None:
    # once and for good: outside of blocks, the hook costs a step of an optimizer one look
    register_optimizer_step_pre_hook(_refuse_inside)


def _refuse_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    guard = _this_thread.guard or _guard_of_backward()
    if guard is not None and _moves(optimizer, guard):
        name = guard.name
        raise AdaptiveUsageError(
            f"{type(optimizer).__name__}.step() was called inside {name}(), which may have to run "
            "its function again: an update can't be taken back. Nothing was updated. Call the "
            f"optimizer after {name}()."
        )


def _moves(optimizer: Optimizer, guard: _Guard) -> bool:
    if guard.parameters is None:
        return True
    moved = (each for group in optimizer.param_groups for each in group["params"])
    return any(id(each) in guard.parameters for each in moved)


def _guard_of_backward() -> _Guard | None:
    """On a thread of autograd's own, the block that waits for it; of several, the first."""
    # threads of C++ are dummies to Python; a data loader's or a user's are not
    if not _guarded or not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    return next(iter(_guarded.copy().values()), None)
