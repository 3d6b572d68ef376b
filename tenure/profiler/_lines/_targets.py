"""What a user hands to a profiler: functions, whose lines are watched, and the device to measure.

Behind methods, partials, wrappers and modules stand Python functions. Lines are watched by code
object, so all closures made by one ``def`` are one function here.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tenure._callers import warn_user
from tenure._devices import indexed
from tenure._errors import ProfilerUsageError, ProfilerUsageWarning
from tenure._text import counted

# What wraps itself, or has an answer for every attribute, would never end.
_MAX_LAYERS = 100
SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""The flags of a code whose frames may wait, and go on later."""
_CPU = torch.device("cpu")


def function_of(handed: Any) -> FunctionType:
    """Return the function whose body runs when ``handed`` is called.

    Raises:
        ProfilerUsageError: no Python function does.
    """
    found = handed
    for _ in range(_MAX_LAYERS):
        if (inside := _inside(found)) is None:
            break
        found = inside
    if isinstance(found, FunctionType):
        return found
    kind = "a class" if isinstance(handed, type) else f"of type {type(handed).__name__}"
    raise ProfilerUsageError(
        f"{getattr(handed, '__qualname__', None) or repr(handed)} has no lines to profile: it is "
        f"{kind}, and no Python function runs when it is called. Pass a function or a method, a "
        "partial or a wrapper of one, or a module."
    )


def _inside(handed: Any) -> Any:
    """Return what stands inside a wrapper, a method or a module; None for anything else."""
    if isinstance(handed, type):
        return None
    if isinstance(handed, functools.partial):
        return handed.func
    if isinstance(handed, property):
        return handed.fget
    if isinstance(handed, nn.Module):
        return handed.forward
    for name in ("__func__", "__wrapped__"):
        if callable(inside := getattr(handed, name, None)):
            return inside
    call = getattr(type(handed), "__call__", None)  # noqa: B004  # it is asked for, not whether
    return call if isinstance(call, FunctionType) else None


# --- devices


def chosen_device(
    target_gpu: int | str | torch.device | None = None, device: str | torch.device | None = None
) -> torch.device:
    """Return a device, the accelerator of an index, or, of neither, the first accelerator.

    On a machine without any it is the CPU, with a warning if an index was given.

    Raises:
        ProfilerUsageError: the device can't be measured, or there are accelerators, but not this
            one.
    """
    asked = target_gpu if device is None else device
    if not isinstance(asked, int | None):
        return checked_device(asked)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and hasattr(torch.get_device_module(found), "memory_stats"):
        return checked_device(f"{found.type}:{asked or 0}")
    if asked is not None:
        warn_user(
            f"There is no GPU {asked} here, and no other whose memory can be measured: the "
            "memory of the CPU is measured instead.",
            ProfilerUsageWarning,
        )
    return _CPU


def checked_device(device: str | torch.device) -> torch.device:
    """Return a device that can be measured, with its index.

    Raises:
        ProfilerUsageError: it is no device, isn't there, or its module has no ``memory_stats``.
    """
    try:
        found = torch.device(device)
        if found.type == "cpu":
            return _CPU
        module: Any = torch.get_device_module(found)
        n_devices = int(module.device_count())
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ProfilerUsageError(
            f"{device!r} is no device that can be measured: {error}"
        ) from error
    if not hasattr(module, "memory_stats"):
        raise ProfilerUsageError(
            f"{found} can't be measured: torch.{found.type} has no memory_stats(). "
            'Measure the memory of the CPU with set_target_device("cpu").'
        )
    if (found.index or 0) >= n_devices:
        raise ProfilerUsageError(
            f"{found} is not there: this machine has {counted(n_devices, 'such device')}. Name one "
            'that is, or "cpu".'
        )
    return indexed(found)
