"""An account of live bytes: each storage once, for as long as it lives.

Invariant: ``live_bytes`` is the sum over the living storages of what each has grown since it was
first seen; one that was there before begins at nothing. The account keeps no storage alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import UntypedStorage

from tenure._torch.storages import key_of


class LiveStorages:
    """Counts storages of one device, by weak references whose callbacks come when they die.

    Attributes:
        live_bytes: what is counted now.
    """

    __slots__ = ("_device", "_entries", "_lock", "live_bytes")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: dict[int, _CountedStorage] = {}
        # Storages die on any thread, and backward passes of accelerators run on threads of their
        # own; reentrant, because a garbage collection may let one die at any point in here.
        self._lock = RLock()
        self.live_bytes = 0

    def note_existing(self, storages: Iterable[UntypedStorage]) -> None:
        """Enter storages that were there before: only what they grow from now on counts."""
        with self._lock:
            for storage in storages:
                if key_of(storage) not in self._entries and storage.device == self._device:
                    self._enter(storage, storage.nbytes())

    def note_made(self, storages: Iterable[UntypedStorage]) -> int:
        """Enter storages that an operation gave back, and return what they have grown, in bytes."""
        grown_bytes = 0
        # an in-place operation gives back a storage that was noted: its growth alone is new
        with self._lock:
            for storage in storages:
                entry = self._entries.get(key_of(storage))
                if entry is not None:
                    grown_bytes += self._measure(entry, storage)
                elif storage.device == self._device:
                    grown_bytes += self._measure(self._enter(storage, 0), storage)
        return grown_bytes

    def note_moved(self, before: UntypedStorage, after: UntypedStorage) -> None:
        """Enter a storage that takes the place of another, as counted as that one is."""
        with self._lock:
            entry = self._entries.get(key_of(before))
            if key_of(after) not in self._entries and after.device == self._device:
                is_counted = entry is not None and entry.counted_bytes > 0
                self._measure(self._enter(after, 0 if is_counted else after.nbytes()), after)

    def note_summed(self, before: UntypedStorage, after: UntypedStorage) -> None:
        """Count the result of a sum in place of its first operand, which the sum frees."""
        with self._lock:
            entry = self._entries.get(key_of(before))
            if entry is None:
                return
            # a gradient may lie in a larger storage, which then stays for as long as the sum
            base_bytes = after.nbytes() - entry.counted_bytes
            self._enter(after, base_bytes).counted_bytes = entry.counted_bytes
            entry.base_bytes, entry.counted_bytes = before.nbytes(), 0

    def note_resized(self, storage: UntypedStorage, n_bytes: int) -> int:
        """Count a storage that is about to have a size, and return what it will have grown."""
        if storage.device != self._device:
            return 0
        with self._lock:
            entry = self._entries.get(key_of(storage))
            if entry is None:
                entry = self._enter(storage, storage.nbytes())
            return self._count(entry, n_bytes)

    def counts(self, storage: UntypedStorage) -> bool:
        """Return whether some of its bytes are among the live ones."""
        with self._lock:
            entry = self._entries.get(key_of(storage))
            return entry is not None and entry.counted_bytes > 0

    def measure_again(self) -> None:
        """Take up what became of the storages without an operation, as by ``storage.resize_``."""
        with self._lock:
            # a copy: a storage that dies meanwhile takes its entry away
            for entry in list(self._entries.values()):
                storage = entry()
                if storage is not None:
                    self._measure(entry, storage)

    def stop(self) -> None:
        """Forget the storages; ``live_bytes`` stays as it is."""
        with self._lock:
            self._entries.clear()

    def _enter(self, storage: UntypedStorage, base_bytes: int) -> _CountedStorage:
        key = key_of(storage)
        entry = _CountedStorage(storage, self._forget)
        entry.key, entry.base_bytes, entry.counted_bytes = key, base_bytes, 0
        # complete, whenever Ctrl-C comes
        self._entries[key] = entry
        return entry

    def _measure(self, entry: _CountedStorage, storage: UntypedStorage) -> int:
        return self._count(entry, storage.nbytes())

    def _count(self, entry: _CountedStorage, n_bytes: int) -> int:
        counted_bytes = max(0, n_bytes - entry.base_bytes)
        grown_bytes = counted_bytes - entry.counted_bytes
        self.live_bytes += grown_bytes
        entry.counted_bytes = counted_bytes
        return grown_bytes

    def _forget(self, entry: Any) -> None:
        with self._lock:
            # without a call, after which Ctrl-C may come
            if entry.key in self._entries:
                self.live_bytes -= entry.counted_bytes
                del self._entries[entry.key]


class _CountedStorage(ref[UntypedStorage]):
    """A storage; ``key`` is its address in C++, unique while it lives."""

    __slots__ = ("base_bytes", "counted_bytes", "key")

    key: int
    base_bytes: int
    counted_bytes: int
