"""Keeping optimizers out of work that may run again: what they move can't be put back."""

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


@contextmanager
def no_optimizer_steps(name: str) -> Iterator[None]:
    """A block in which an optimizer that steps on this thread raises.

    Args:
        name: what the error calls the block.

    Raises:
        AdaptiveUsageError: in the block, from ``optimizer.step()``, before it changes anything.
    """
    _listen()
    before, _this_thread.name = _this_thread.name, name
    try:
        yield
    finally:
        _this_thread.name = before


@functools.cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_refuse_inside)


def _refuse_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _this_thread.name is not None:
        raise AdaptiveUsageError(
            f"{type(optimizer).__name__}.step() was called inside {_this_thread.name}(), which may "
            "have to run its function again: an update can't be taken back. Nothing was updated. "
            f"Call the optimizer after {_this_thread.name}()."
        )
