"""Which device is meant: its module, and the index that its storages have."""

from __future__ import annotations

from typing import Any

import torch


def indexed(device: torch.device) -> torch.device:
    """The device with an index; without one it is the current device of its kind.

    Where torch knows no current device, as for MPS, there is one at the most.
    """
    if device.index is not None:
        return device
    current = getattr(torch.get_device_module(device), "current_device", None)
    return torch.device(device.type, 0 if current is None else current())


def accelerator_of(device: str | None) -> tuple[Any, torch.device] | None:
    """The module and the device that an OomInfo names; None for the host and what is not there."""
    if device is None or device == "cpu":
        return None
    try:
        found = indexed(torch.device(device))
        return torch.get_device_module(found), found
    except Exception:  # torch does not know it, or this machine, or this process, has none
        return None
