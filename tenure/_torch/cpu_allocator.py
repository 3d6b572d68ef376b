"""The sizes of live blocks of host memory, which c10 keeps but shows to no Python function.

c10 has a table of them, filled while a flag or a profiler asks for it; a block that is not in it is
freed unseen. The table is reached in the library itself: a flag, a function and a method that it
exports, and one number of an object whose place the table finds by trial. Where that trial fails
all that is lost is told by ``is_known``: levels of memory, and blocks from before.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from . import optional
from .quiet import aside

_is_cow_tensor = optional("torch._C._is_cow_tensor")
C10_LIBRARY = str(
    Path(torch.__file__).parent / "lib" / f"libc10.{'dylib' if sys.platform == 'darwin' else 'so'}"
)
_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
_NEW = "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm"
# A mutex, a hash table and two counters: 112 bytes with glibc, 120 with libc++.
_N_WORDS = 14
_PROBE_BYTES = (12_347, 23_459)


class _NullTable:
    """A table that keeps nothing, for builds of torch that don't let c10's be reached."""

    is_known = False

    def __init__(self) -> None:
        self.flag = ctypes.c_bool(False)
        self.live: Any = ctypes.c_size_t(0)
        self.n_unseen = ctypes.c_size_t(0)
        # what the program had asked for before we did; None while we ask for nothing
        self.asked_before: bool | None = None

    def enter(self, address: int, n_bytes: int) -> None:
        """Note a block."""


class _C10Table(_NullTable):
    """c10's ``ProfiledCPUMemoryReporter``.

    Source: https://github.com/pytorch/pytorch/blob/main/c10/core/CPUAllocator.h
    """

    is_known = True

    def __init__(self) -> None:
        super().__init__()
        library: Any = ctypes.CDLL(C10_LIBRARY)
        self.flag = ctypes.c_bool.in_dll(library, _FLAG)
        reporter = getattr(library, _REPORTER)
        reporter.restype = ctypes.c_void_p
        self._address: int = reporter()
        self._new = getattr(library, _NEW)
        self._new.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._new.restype = None
        self.live = self._find_live()
        # behind it c10 counts the blocks that are freed unseen
        self.n_unseen = ctypes.c_size_t.from_address(ctypes.addressof(self.live) + 8)

    def enter(self, address: int, n_bytes: int) -> None:
        self._new(self._address, address, n_bytes)

    def _find_live(self) -> Any:
        """Return the counter that grows and shrinks by exactly a block, tried with two sizes."""
        words = [ctypes.c_size_t.from_address(self._address + 8 * i) for i in range(_N_WORDS)]
        # a budget that is open counts what is made to try
        with sizes_kept(self), aside():
            for n_bytes in _PROBE_BYTES:
                words = [word for word in words if _counts(word, n_bytes)]
        if len(words) != 1:
            raise LookupError(f"{len(words)} counters of c10 look like that of live bytes")
        return words[0]


def is_known() -> bool:
    """Return whether this build of torch lets its table be reached."""
    return _table().is_known


def keep_sizes() -> None:
    """Let c10 keep the size of every block of host memory from now on, on all threads."""
    table = _table()
    if table.asked_before is None:
        table.asked_before = table.flag.value
    _ask(table)


def keep_sizes_as_before() -> None:
    """Set the flag as the program had it before `keep_sizes`."""
    table = _table()
    if table.asked_before is not None:
        table.flag.value, table.asked_before = table.asked_before, None


@contextmanager
def sizes_kept(table: _NullTable | None = None) -> Iterator[None]:
    """Return a block in which the sizes of new blocks are kept; restored afterwards."""
    table = table or _table()
    before = table.flag.value
    _ask(table)
    try:
        yield
    finally:
        table.flag.value = before


def _ask(table: _NullTable) -> None:
    table.flag.value = True
    # of each thousand that are freed unseen, c10 would log the first
    table.n_unseen.value = 1


def live_bytes() -> int:
    """Return the bytes of the blocks in the table; differences are those of live memory."""
    return int(live_counter().value)


def live_counter() -> Any:
    """Return the counter of these bytes, to read ``value`` often; it is 0 if not known."""
    return _table().live


def enter(storage: UntypedStorage) -> None:
    """Put a storage of host memory into the table, while sizes are kept, so that its end is seen.

    Not while a profiler's session is open on this thread: the storage would seem to be made now.
    """
    if storage.nbytes():
        _table().enter(storage.data_ptr(), storage.nbytes())


def is_lazily_copied(tensor: Tensor) -> bool:
    """Return whether its storage is another's until one of them is written to."""
    return bool(_is_cow_tensor(tensor))


@functools.cache
def _table() -> _NullTable:
    # to ask a lazy copy for its address would copy it, so none can be entered without this
    if _is_cow_tensor is None:
        return _NullTable()
    try:
        return _C10Table()
    # another build: no such symbols
    except (OSError, AttributeError, ValueError, LookupError):
        return _NullTable()


def _counts(word: Any, n_bytes: int) -> bool:
    before = word.value
    block = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
    during = word.value
    del block
    return bool(during - before == n_bytes and word.value == before)
