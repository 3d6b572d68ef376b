"""Keeping optimizers out of work that may run again: what they move can't be put back.

Hooks run where autograd runs them: for the CPU on this thread, for a device on one of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tenure._errors import AdaptiveUsageError


class _Thread(threading.local):
    name: str | None = None


_this_thread = _Thread()
# Autograd's own threads, one for each device, see nothing of what `_this_thread` holds.
_guarded: dict[int, str] = {}
"""The blocks that are open, by thread."""


@contextmanager
def no_optimizer_steps(name: str) -> Iterator[None]:
    """A block in which an optimizer that steps on this thread, or in a backward pass of it, raises.

    Args:
        name: what the error calls the block.

    Raises:
        AdaptiveUsageError: in the block, from ``optimizer.step()``, before it changes anything.
    """
    _listen()
    before, _this_thread.name = _this_thread.name, name
    _guarded[threading.get_ident()] = name
    try:
        yield
    finally:
        _this_thread.name = before
        # a step inside a step is still inside the outer one
        if before is None:
            del _guarded[threading.get_ident()]


@functools.cache
def _listen() -> None:
    # once and for good: outside of blocks, the hook costs a step of an optimizer one look
    register_optimizer_step_pre_hook(_refuse_inside)


def _refuse_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    name = _this_thread.name or _name_of_backward()
    if name is not None:
        raise AdaptiveUsageError(
            f"{type(optimizer).__name__}.step() was called inside {name}(), which may have to run "
            "its function again: an update can't be taken back. Nothing was updated. Call the "
            f"optimizer after {name}()."
        )


def _name_of_backward() -> str | None:
    """On a thread of autograd's own, the block that waits for it; of several, the first."""
    # threads of C++ are dummies to Python; a data loader's or a user's are not
    if not _guarded or not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    return next(iter(_guarded.copy().values()), None)
