"""Which device is meant, and which one is current in a thread.

What names no index means the device that is current in the calling thread. A device that a thread
turns to gets its context then, as with CUDA 12, unless it was current already.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .._torch_backend import DEVICE_TYPE
from ._machine import machine


class _ChoicesOfThread(threading.local):
    """What a thread has chosen: a device, and by device a stream; and what it had chosen around."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, Any] = {}
        self.outer: list[tuple[int, Any]] = []


this_thread = _ChoicesOfThread()


def current_device() -> int:
    """Return the index of this thread's current device; 0 if a restart removed it."""
    return this_thread.index if this_thread.index < len(machine.devices) else 0


def turn_to(index: int) -> None:
    """Make a device current in this thread, with a context."""
    if index != current_device():
        machine.devices[index].has_context = True
    this_thread.index = index


def turn_back(index: int) -> None:
    """Make current again what was so before; no context comes to life by that."""
    this_thread.index = index


@contextlib.contextmanager
def made_current(index: int) -> Iterator[None]:
    """Context in which a device is the current one, as torch's guards make it."""
    before = current_device()
    turn_to(index)
    try:
        yield
    finally:
        turn_back(before)


def index_of(device: torch.device | str | int | None) -> int:
    """Return the index of the device that is meant; -1 is the current one, as on CUDA.

    Raises:
        ValueError: a device of another type.
        RuntimeError: an index that does not exist.
    """
    if device is None or device == -1:
        return current_device()
    asked = torch.device(DEVICE_TYPE, device) if isinstance(device, int) else torch.device(device)
    if asked.type != DEVICE_TYPE:
        raise ValueError(f"Expected a {DEVICE_TYPE} device, but got: {asked}")
    if asked.index is None:
        return current_device()
    if asked.index >= len(machine.devices):
        raise RuntimeError(f"invalid device ordinal: there is no {asked}; {_what_there_is()}.")
    return asked.index


def context_for_pinning() -> None:
    """Pinning takes a context that is there, on whatever device, or makes one on the current.

    Source: getDeviceIndexWithPrimaryContext in PyTorch's CachingHostAllocator.
    """
    machine.forbid_in_bad_fork()
    if not machine.contexts:
        machine.devices[current_device()].has_context = True


def _what_there_is() -> str:
    last = len(machine.devices) - 1
    if last == 0:
        return f"the simulated machine has one device, {DEVICE_TYPE}:0"
    return f"the simulated machine has {DEVICE_TYPE}:0 to {DEVICE_TYPE}:{last}"
