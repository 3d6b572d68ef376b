"""What a memory budget refuses, and in which words; each check raises before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from threading import current_thread, get_ident
from typing import TYPE_CHECKING, Any

import torch

from tenure._capture import is_capturing
from tenure._devices import indexed
from tenure._errors import AdaptiveUsageError
from tenure._text import parse_bytes

from .._callables import is_suspendable, name_of

if TYPE_CHECKING:
    from ._budget import memory_budget

_ONE_BLOCK = "A budget is neither reusable nor reentrant: make a new one with memory_budget()."
_WITHOUT_MEMORY = ("meta",)


def checked_limit(limit: int | str) -> int:
    """The bytes of a limit.

    Raises:
        ByteSizeError: it is no number of bytes.
        AdaptiveUsageError: it is zero.
    """
    n_bytes = parse_bytes(limit)
    if n_bytes == 0:
        raise AdaptiveUsageError(
            "memory_budget() got a limit of 0 bytes, in which nothing fits. Give at least 1 byte."
        )
    return n_bytes


def checked_device(device: str | torch.device) -> torch.device:
    """A device that is there, with the index it has on its storages.

    Raises:
        AdaptiveUsageError: torch doesn't know it, it isn't there, or it has no memory.
    """
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError(f"a device is a str or a torch.device, not a {type(device).__name__}")
        found = torch.device(device)
        # No tensor is on "cpu:0": torch drops that index, and would find the two devices unequal.
        if found.type == "cpu":
            return torch.device("cpu")
        return _checked_accelerator(found)
    except (RuntimeError, TypeError) as error:
        # CUDA's errors go on with lines of advice on how to debug kernels.
        reason = str(error).partition("\n")[0]
        raise AdaptiveUsageError(
            f"memory_budget() can't limit device={device!r}: {reason}. Name a device that "
            'tensors can be made on, such as "cpu" or "cuda:0".'
        ) from error


def check_new(budget: memory_budget, status: str) -> None:
    """Make sure that a budget was not opened before.

    Raises:
        AdaptiveUsageError: it was.
    """
    if status != "not yet open":
        raise AdaptiveUsageError(f"{budget!r} was entered a second time. {_ONE_BLOCK}")


def check_not_capturing(budget: memory_budget) -> None:
    """Make sure that the limit is set before or after a graph is captured.

    Raises:
        AdaptiveUsageError: the device captures one.
    """
    if is_capturing(budget.device):
        raise AdaptiveUsageError(
            f"{budget!r} was entered while a graph is being captured on {budget.device}: it gives "
            "cached memory back, which breaks the capture, and a replay makes nothing that it "
            "could count. Open it around the capture."
        )


def check_open(budget: memory_budget, status: str, thread_id: int) -> None:
    """Make sure that a budget is closed once, and where it was opened.

    Raises:
        AdaptiveUsageError: it isn't open, or this is another thread.
    """
    if status != "open":
        raise AdaptiveUsageError(f"{budget!r} was closed, but it is not open. {_ONE_BLOCK}")
    if thread_id != get_ident():
        raise AdaptiveUsageError(
            f"{budget!r} was closed from thread {current_thread().name!r}, and stays open. "
            "A budget belongs to the thread that opened it: close it there."
        )


def check_plain_function(function: Callable[..., Any]) -> None:
    """Make sure that a function runs from its call to its return.

    Raises:
        AdaptiveUsageError: it is no function, or can be suspended, with the budget open.
    """
    if not callable(function):
        raise AdaptiveUsageError(f"@memory_budget() wants a function, and got {function!r}.")
    if is_suspendable(function):
        raise AdaptiveUsageError(
            f"@memory_budget() got {name_of(function)}(), which can be suspended while what it "
            "makes lives on. Open a budget in the function that runs it."
        )


def _checked_accelerator(device: torch.device) -> torch.device:
    if device.type in _WITHOUT_MEMORY:
        raise RuntimeError("its tensors have no memory")
    module = torch.get_device_module(device)
    if not module.is_available():
        raise RuntimeError("this machine, or this build of torch, has none")
    found = indexed(device)
    if found.index >= module.device_count():
        raise RuntimeError(f"this machine has {module.device_count()} of its type")
    return found
