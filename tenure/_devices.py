"""Which device is meant, what its module tells of its allocator, and work on one that is not here.

Nothing is synchronized, emptied or reset. What a room refuses, it says in words of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NO_ACCELERATOR = ("cpu", "meta")
"""The types of devices that no accelerator is behind: there is one of each, without an index."""
# A backend need not have `memory_stats()`, and that of a device not yet in use is empty. MPS has
# functions of other names, without a device: see
# test_the_only_device_of_its_kind_has_its_own_names.
_WITHOUT_STATS = {
    "allocated": ("memory_allocated", "current_allocated_memory"),
    "reserved": ("memory_reserved", "driver_allocated_memory"),
}


class Counters(NamedTuple):
    """The bytes that an allocator counts of one device; None for what its backend doesn't tell.

    Attributes:
        allocated: of the blocks in use.
        requested: that were asked for; less by what blocks are rounded up.
        active: in use, and those that the work of a stream still uses.
        reserved: all that it took from the device, in use or cached.
        inactive_split: the free parts of segments that are in use.
    """

    allocated: int | None
    requested: int | None
    active: int | None
    reserved: int | None
    inactive_split: int | None


def indexed(device: str | int | torch.device) -> torch.device:
    """Return the device with the index that its storages have; that of the host has none.

    Without an index it is the current device of its kind.

    Raises:
        RuntimeError: torch doesn't know it, or has none to be the current one.
        AssertionError: this build of torch has no such devices.
        TypeError: it is no device.
    """
    found = torch.device(device)
    if found.type in NO_ACCELERATOR:
        return torch.device(found.type)
    if found.index is not None:
        return found
    # where torch knows no current device, as for MPS, there is one at the most
    current = getattr(torch.get_device_module(found), "current_device", None)
    return torch.device(found.type, 0 if current is None else current())


def accelerator_of(device: str | torch.device | None) -> tuple[Any, torch.device] | None:
    """Return the module and the device that is named; None for the host and what is not there."""
    if device is None:
        return None
    try:
        found = indexed(device)
        return None if found.type in NO_ACCELERATOR else (torch.get_device_module(found), found)
    # torch does not know it, or this machine, or this process, has none
    except Exception:
        return None


def counters_of(module: Any, device: torch.device) -> Counters:
    """Return the counters of a device's allocator, whatever its module calls them."""
    stats = told_by(module, "memory_stats", device) or {}
    told = {name: stats.get(f"{name}_bytes.all.current") for name in Counters._fields}
    for name, (of_device, of_the_only_one) in _WITHOUT_STATS.items():
        if told[name] is None:
            told[name] = told_by(module, of_device, device)
        if told[name] is None:
            told[name] = told_by(module, of_the_only_one)
    return Counters(**told)


def told_by(module: Any, function: str, *args: Any) -> Any:
    """Call a function of a device's module; return None if it is missing or raises."""
    try:
        return getattr(module, function)(*args)
    except (AttributeError, RuntimeError):
        return None


def free_memory(module: Any, device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that are free on a device, and all; None if its module does not tell them.

    If the program has set a memory fraction, both are what that leaves to this process.
    """
    told = told_by(module, "mem_get_info", device)
    if told is None:
        return None
    free_bytes, total_bytes = map(int, told)
    fraction = told_by(module, "get_per_process_memory_fraction", device)
    if fraction is not None:
        reserved_bytes = int(told_by(module, "memory_reserved", device) or 0)
        total_bytes = int(fraction * total_bytes)
        free_bytes = min(free_bytes, max(0, total_bytes - reserved_bytes))
    return free_bytes, total_bytes


# --- devices that are not here


def is_here(kind: str) -> bool:
    """Return whether this machine has a device of a kind, such as ``"cuda"``."""
    try:
        module: Any = torch.get_device_module(kind)
        return bool(module.is_available())
    # torch knows no such backend, or not how to ask it
    except (RuntimeError, AttributeError):
        return False


class Elsewhere(TorchFunctionMode):
    """A block in which work on a device that is not here is on another one.

    Below, torch would look for the device's driver. Moves by name, as ``Tensor.cuda()``, leave the
    tensor where it is.

    Args:
        is_missing: whether a kind of device is to be taken for the other one.
        instead: the other one.
        keeps_names: whether a ``torch.device`` that the program makes keeps its name, for whatever
            it asks of that, and becomes the other one where it is used. What is kept longer than
            the block has to be the other one from the start.
    """

    def __init__(
        self, is_missing: Callable[[str], bool], instead: torch.device, *, keeps_names: bool
    ) -> None:
        super().__init__()
        self._is_missing, self._instead, self._keeps_names = is_missing, instead, keeps_names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moved = args and isinstance(args[0], Tensor)
        if moved and self._is_missing(getattr(func, "__name__", "")):
            return args[0]
        if func is torch.device and self._keeps_names:
            return func(*args, **kwargs)
        named = {name: self._here(value) for name, value in kwargs.items()}
        return func(*map(self._here, args), **named)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.device) and self._is_missing(value.type):
            return self._instead
        if isinstance(value, str) and self._is_missing(value.partition(":")[0]):
            return str(self._instead)
        return value
