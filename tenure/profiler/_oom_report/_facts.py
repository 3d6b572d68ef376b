"""What is known when memory runs out: the error, what ran, the tensors, the allocator, the host.

Each part is asked for by itself, and one that fails is missing: memory is short while this runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import torch

from tenure import _host_memory
from tenure._account import is_counted
from tenure._oom import OomInfo, allowed_bytes_in, free_bytes_in, limit_bytes_in, own_bytes_in
from tenure._text import format_bytes

from .._allocator import allocator_bytes, cached_memory
from .._owners import (
    BUFFERS,
    GRADIENTS,
    OPTIMIZER_STATE,
    OTHERS,
    PARAMETERS,
    SAVED,
    StorageEntry,
    take_census,
)
from ._scene import Scene
from ._watch import Notes

# in the text of its errors
_OF_BUDGET = "memory_budget has a limit"


@dataclass(slots=True)
class Facts:
    """All that a cause is judged by; each part is as it is here until it has been looked at.

    Attributes:
        info: the error.
        noted: what the program did before.
        began_bytes: what the process had of the host's memory when recording began.
        is_handled: somebody may still handle the error.
        scene: what ran.
        device: where memory ran out, as tensors spell it.
        entries: the storages there.
        total_bytes: the memory of the device, or the limit on it.
        free_bytes: what of it was free.
        others_bytes: what of it other processes have.
        fragmentation: as `OomReport` has it.
        host: as `OomReport` has it.
        notes: what could not be seen.
    """

    info: OomInfo
    noted: Notes
    began_bytes: int
    is_handled: bool
    scene: Scene = field(default_factory=Scene)
    device: str = "cpu"
    entries: list[StorageEntry] = field(default_factory=list)
    total_bytes: int | None = None
    free_bytes: int | None = None
    others_bytes: int = 0
    fragmentation: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def wanted_bytes(self) -> int:
        """What the allocation asked for; 0 where nothing tells."""
        return self.info.requested_bytes or 0

    @property
    def used_bytes(self) -> int:
        """What the tensors that were found take on the device."""
        return sum(entry.owner.n_bytes for entry in self.entries)

    @property
    def all_bytes(self) -> int:
        """What was in use, and what the allocation asked for."""
        return self.used_bytes + self.wanted_bytes

    @property
    def fixed_bytes(self) -> int:
        """What a model and its training take, whatever the batch."""
        return self.bytes_of(PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE)

    @property
    def movable_bytes(self) -> int:
        """All of the others, and what the allocation asked for."""
        return self.all_bytes - self.fixed_bytes

    @property
    def of_total(self) -> str:
        """How much there is in all, as texts say it; empty where nothing tells."""
        return f" of {format_bytes(self.total_bytes)}" if self.total_bytes else ""

    @property
    def trains(self) -> bool:
        """Whether what ran is a part of training; autograd alone records in most evaluations."""
        scene = self.scene
        if scene.is_backward and not scene.all_in_eval:
            return True
        steps = self.noted.n_steps or self.bytes_of(GRADIENTS, OPTIMIZER_STATE)
        return scene.is_recording and not scene.all_in_eval and bool(steps)

    def bytes_of(self, *categories: str) -> int:
        """What the tensors of some categories take."""
        rows = (entry.owner for entry in self.entries)
        return sum(row.n_bytes for row in rows if row.category in categories)

    def ask(self, look: Callable[[], None], what: str) -> None:
        """Look at one thing; if that fails, it is noted."""
        try:
            look()
        # short of memory: what else is known is told without it
        except MemoryError:
            self.notes.append(f"There was not enough memory left to look at {what}.")
        # a report of an error must not raise another one, whatever it meets in the program
        except Exception as error:
            self.notes.append(f"{what} could not be read: {type(error).__name__}.")

    def look(self, error: BaseException, frame: FrameType | None) -> None:
        """Look at everything once: see `Scene.look` for the arguments."""
        text = self.info.text
        self.device = self.info.device or "cpu"
        self.total_bytes, self.free_bytes = limit_bytes_in(text), free_bytes_in(text)
        self.ask(lambda: self.scene.look(error, frame, self.noted), "what ran")
        self.ask(self._look_at_allocator, "the allocator")
        self.ask(self._look_at_tensors, "the tensors")
        self.ask(self._look_at_host, "the host's memory")

    def _look_at_tensors(self) -> None:
        entries = [entry for entry in take_census()[0] if self._is_here(entry.owner.device)]
        if _OF_BUDGET in self.info.text:
            entries = list(filter(_is_in_budget, entries))
        self.entries = entries
        # an error that names no index is of the device that tensors are on
        if entries:
            self.device = entries[0].owner.device

    def _is_here(self, device: str) -> bool:
        return device == self.device or (
            ":" not in self.device and device.startswith(f"{self.device}:")
        )

    def _look_at_allocator(self) -> None:
        counted = allocator_bytes(torch.device(self.device))
        if counted is None:
            return
        self.fragmentation = {
            "allocated_bytes": counted.allocated,
            "reserved_bytes": counted.reserved,
            "unused_bytes": counted.reserved - counted.allocated,
        }
        text, total, free = self.info.text, self.total_bytes, self.free_bytes
        # what a fraction leaves out is nobody's
        if total is not None and free is not None and allowed_bytes_in(text) is None:
            own = own_bytes_in(text) or counted.reserved
            self.others_bytes = max(0, total - free - own)
        cached = cached_memory(torch.device(self.device))
        if cached is not None:
            self.fragmentation["largest_free_bytes"] = cached.largest_free_bytes

    def _look_at_host(self) -> None:
        group = _host_memory.tightest_group()
        told = {
            "rss_bytes": _host_memory.resident_bytes(),
            "free_bytes": _host_memory.free_host_bytes(),
            "limit_bytes": None if group is None else group.limit_bytes,
            "group_free_bytes": None if group is None else group.free_bytes,
            "own_limit_bytes": _host_memory.data_limit(),
        }
        self.host = {name: n_bytes for name, n_bytes in told.items() if n_bytes is not None}
        if self.device == "cpu" and self.total_bytes is None:
            self.total_bytes = told["own_limit_bytes"]


def _is_in_budget(entry: StorageEntry) -> bool:
    """False for a tensor from before the block of a budget, which counts none of its bytes.

    A model and its gradients stay: rules measure what ran by their bytes.
    """
    storage = None if entry.identity is None else entry.identity()
    return entry.owner.category not in (OTHERS, SAVED) or storage is None or is_counted(storage)
