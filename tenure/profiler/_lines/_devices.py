"""Which device a profiler measures: what was asked for, if it can be measured."""

from __future__ import annotations

from typing import Any

import torch

from tenure._callers import warn_user
from tenure._devices import indexed
from tenure._errors import ProfilerUsageError, ProfilerUsageWarning
from tenure._text import counted

_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """The first accelerator, if its memory can be measured; else the CPU."""
    accelerator = _accelerator()
    return _CPU if accelerator is None else torch.device(accelerator, 0)


def device_of_gpu(target_gpu: int | str | torch.device) -> torch.device:
    """The accelerator of an index, or a device; on a machine without any, the CPU, with a warning.

    Raises:
        ProfilerUsageError: there are accelerators, but not this one; or none can have the index.
    """
    if not isinstance(target_gpu, int):
        return checked_device(target_gpu)
    if target_gpu < 0:
        raise ProfilerUsageError(
            f"There is no accelerator {target_gpu}: an index is 0 or more. Name one that is there, "
            'or "cpu".'
        )
    accelerator = _accelerator()
    if accelerator is not None:
        return checked_device(torch.device(accelerator, target_gpu))
    warn_user(
        f"There is no GPU {target_gpu} here, and no other whose memory can be measured: the memory "
        "of the CPU is measured instead.",
        ProfilerUsageWarning,
    )
    return _CPU


def checked_device(device: str | torch.device) -> torch.device:
    """A device that can be measured, with its index.

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
    # where none is there, torch knows no current one
    chosen = indexed(found) if n_devices else torch.device(found.type, found.index or 0)
    if chosen.index >= n_devices:
        has = counted(n_devices, "such device") if n_devices else "no such devices"
        raise ProfilerUsageError(
            f'{found} is not there: this machine has {has}. Name one that is, or "cpu".'
        )
    return chosen


def _accelerator() -> str | None:
    """The kind of accelerator that is there and whose module offers statistics."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or not hasattr(torch.get_device_module(found), "memory_stats"):
        return None
    return found.type
