"""What is known when memory runs out: the error, the tensors, the allocator, the host.

Each part is asked for by itself, and one that fails is missing: memory is short while this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.optim import Optimizer

from tenure import _host_memory
from tenure._account import is_counted
from tenure._oom import (
    OomInfo,
    allowed_bytes_in,
    free_bytes_in,
    limit_bytes_in,
    own_bytes_in,
)

from .._allocator import AllocatorBytes, CachedMemory, allocator_bytes, cached_memory
from .._owners import OTHERS, SAVED, StorageEntry, take_census
from ._models import piles_of_models
from ._notes import Joined, Notes
from ._piles import Pile
from ._scene import Scene

T = TypeVar("T")
# in the text of its errors
_OF_BUDGET = "memory_budget has a limit"


@dataclass(frozen=True, slots=True)
class Host:
    """The memory of the host.

    Attributes:
        rss_bytes: what this process has of it.
        began_bytes: the same when recording began.
        free_bytes: what the process may take more, by the machine, containers, and its own limit.
        limit_bytes: the limit of the tightest container; None where none has one.
        group_free_bytes: what is free in it.
        own_limit_bytes: the limit of the process itself; None without one.
    """

    rss_bytes: int
    began_bytes: int
    free_bytes: int
    limit_bytes: int | None
    group_free_bytes: int | None
    own_limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a cause is judged by.

    Attributes:
        info: the error.
        scene: what ran.
        device: where memory ran out, as tensors spell it.
        entries: the storages there.
        is_handled: somebody may still handle the error: its traceback is of what ran inside torch.
        steps: how many steps of optimizers have ended since recording began.
        counters: what the allocator counts; None where it counts nothing.
        cached: its blocks.
        total_bytes: the memory of the device, or the limit on it.
        free_bytes: what of it was free.
        others_bytes: what of it other processes have.
        host: the host's memory; None where it could not be read.
        models: what keeps models and optimizers, and gradients of theirs, without use.
        joined: what grew by `torch.cat`.
        notes: what could not be seen.
    """

    info: OomInfo
    scene: Scene
    device: str
    entries: tuple[StorageEntry, ...] = ()
    is_handled: bool = True
    steps: int = 0
    counters: AllocatorBytes | None = None
    cached: CachedMemory | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    others_bytes: int = 0
    host: Host | None = None
    models: tuple[Pile, ...] = ()
    joined: dict[int, Joined] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=())

    @property
    def wanted_bytes(self) -> int:
        """What the allocation asked for; 0 where nothing tells."""
        return self.info.requested_bytes or 0

    @property
    def used_bytes(self) -> int:
        """What the tensors that were found take on the device."""
        return sum(entry.owner.n_bytes for entry in self.entries)

    def bytes_of(self, *categories: str) -> int:
        """What the tensors of some categories take."""
        found = (e.owner for e in self.entries if e.owner.category in categories)
        return sum(row.n_bytes for row in found)


def gather(
    info: OomInfo,
    scene: Scene,
    *,
    is_handled: bool,
    steps: int,
    last_steps: Mapping[Optimizer, int],
    notes_of: Notes,
    began_bytes: int,
) -> Facts:
    """Look at everything once."""
    notes: list[str] = []
    device = info.device or "cpu"
    counted = _or_none(lambda: allocator_bytes(torch.device(device)), notes, "the allocator")
    # an error that names no index is of the device that tensors are on
    entries = _or_none(lambda: take_census()[0], notes, "the tensors") or []
    here = [entry for entry in entries if _is_on(entry, device)]
    if _OF_BUDGET in info.text:
        here = [entry for entry in here if _is_in_budget(entry)]
    if here:
        device = here[0].owner.device
    total, free = limit_bytes_in(info.text), free_bytes_in(info.text)
    host = _or_none(lambda: _host(began_bytes), notes, "the host's memory")
    if device == "cpu" and total is None and host is not None:
        total = host.own_limit_bytes
    return Facts(
        info,
        scene,
        device,
        tuple(here),
        is_handled,
        steps,
        counted,
        _or_none(lambda: cached_memory(torch.device(device)), [], "") if counted else None,
        total,
        free,
        _others_bytes(info.text, total, free, counted),
        host,
        _or_none(lambda: piles_of_models(device, notes_of, last_steps, steps), notes, "the models")
        or (),
        notes_of.joined,
        tuple(notes),
    )


def _is_on(entry: StorageEntry, device: str) -> bool:
    found = entry.owner.device
    return found == device or (":" not in device and found.startswith(f"{device}:"))


def _is_in_budget(entry: StorageEntry) -> bool:
    """False for a tensor from before the block of a budget, which counts none of its bytes.

    A model and its gradients stay: rules measure what ran by their bytes.
    """
    storage = None if entry.identity is None else entry.identity()
    return entry.owner.category not in (OTHERS, SAVED) or storage is None or is_counted(storage)


def _or_none(ask: Callable[[], T], notes: list[str], what: str) -> T | None:
    try:
        return ask()
    # short of memory: what else is known is told without it
    except MemoryError:
        notes.append(f"There was not enough memory left to look at {what}.")
    # a report of an error must not raise another one, whatever it meets in the program's objects
    except Exception as error:
        notes.append(f"{what} could not be read: {type(error).__name__}.")
    return None


def _host(began_bytes: int) -> Host:
    group = _host_memory.tightest_group()
    return Host(
        _host_memory.resident_bytes(),
        began_bytes,
        _host_memory.free_host_bytes(),
        None if group is None else group.limit_bytes,
        None if group is None else group.free_bytes,
        _host_memory.data_limit(),
    )


def _others_bytes(
    text: str, total: int | None, free: int | None, counted: AllocatorBytes | None
) -> int:
    """What of a device neither is free nor is this process's."""
    if total is None or free is None or counted is None:
        return 0
    # what a fraction leaves out is nobody's
    if allowed_bytes_in(text) is not None:
        return 0
    own = own_bytes_in(text) or counted.reserved
    return max(0, total - free - own)
