"""One account of the memory that tenure takes where no mode sees it: pages, staging, buffers.

Invariant: who limits a thread's memory is told of each byte that is taken on it, once, before it is
used. What is refused is gone when the error is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage


class Limit(Protocol):
    """What limits the memory that one thread takes."""

    def note_taken(self, made: list[Tensor], what: str) -> None:
        """Count a tensor that was just made, whichever device it is on.

        Args:
            made: it, and nothing else. The list is emptied before an error is raised.
            what: what it is for.

        Raises:
            torch.OutOfMemoryError: that is too much.
        """
        ...

    def note_moved(self, before: UntypedStorage, after: UntypedStorage) -> None:
        """Let a storage that takes the place of another count as that one did; it never fails."""
        ...

    def available_on(self, device: torch.device) -> int | None:
        """Return the bytes that may still be taken; None where this limits another device."""
        ...

    def counts(self, storage: UntypedStorage) -> bool:
        """Return whether the storage takes some of what this limits."""
        ...


class _Limits(threading.local):
    def __init__(self) -> None:
        self.open: list[Limit] = []


_this_thread = _Limits()


def open_limit(limit: Limit) -> None:
    """Tell this one from now on what this thread takes."""
    _this_thread.open.append(limit)


def close_limit(limit: Limit) -> None:
    """Tell it no more; one that is not open on this thread is ignored."""
    _this_thread.open = [each for each in _this_thread.open if each is not limit]


def taken(make: Callable[[], Tensor], what: str) -> Tensor:
    """Make a tensor where no mode sees it, and count it.

    Args:
        make: makes it.
        what: what messages call it.

    Raises:
        torch.OutOfMemoryError: a limit of this thread has no room for it; it is gone.
    """
    # in a list, for a traceback that leads here must not keep it
    made = [make()]
    for limit in list(_this_thread.open):
        limit.note_taken(made, what)
    return made[0]


def moved(before: Tensor, after: Tensor) -> None:
    """Say that a tensor's memory takes the place of another's, which is about to be let go."""
    for limit in list(_this_thread.open):
        limit.note_moved(before.untyped_storage(), after.untyped_storage())


def is_counted(storage: UntypedStorage) -> bool:
    """Return whether a limit of this thread counts a storage; True if there is no limit."""
    limits = _this_thread.open
    return not limits or any(limit.counts(storage) for limit in limits)


def available_bytes(device: torch.device, free_bytes: int) -> int:
    """Return the bytes that this thread may still allocate on a device with so many free."""
    told = (limit.available_on(device) for limit in _this_thread.open)
    return min([free_bytes, *(n_bytes for n_bytes in told if n_bytes is not None)])
