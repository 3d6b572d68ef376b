"""Which pages of a private mapping of a file this process has written, asked of the kernel.

Invariant: a page that was written is named, by whatever alias that happened; where the kernel does
not tell, nothing is claimed to be unwritten.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
from itertools import pairwise

import torch

_PAGE_BYTES = mmap.PAGESIZE
_ENTRY_BYTES = 8
_PAGEMAP = "/proc/self/pagemap"
# The three highest bits of an entry, https://docs.kernel.org/admin-guide/mm/pagemap.html
_FLAGS_SHIFT = 61
_OF_A_FILE, _HAS_CONTENT = 0b001, 0b110

Runs = list[tuple[int, int]]


def written_runs(address: int, n_bytes: int) -> Runs | None:
    """The written parts of a mapped range, as offsets from its beginning, in order.

    Args:
        address: where the range begins in memory.
        n_bytes: its bytes.

    Returns:
        Pairs of begin and end; None where the kernel does not tell.
    """
    return _runs(address, n_bytes) if works() else None


@functools.cache
def works() -> bool:
    """Whether this kernel tells a page that was written from one that was only read."""
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(2 * _PAGE_BYTES)
            memory = mmap.mmap(file.fileno(), 2 * _PAGE_BYTES, access=mmap.ACCESS_COPY)
            bytes_of = torch.frombuffer(memory, dtype=torch.uint8)
            address = bytes_of.data_ptr()
            before = bytes_of.sum().item(), _runs(address, 2 * _PAGE_BYTES)
            bytes_of[_PAGE_BYTES] = 1
            after = _runs(address, 2 * _PAGE_BYTES)
            return before == (0, []) and after == [(_PAGE_BYTES, 2 * _PAGE_BYTES)]
    except (OSError, ValueError):
        return False


def _runs(address: int, n_bytes: int) -> Runs | None:
    first = address // _PAGE_BYTES
    n_pages = (address + n_bytes - 1) // _PAGE_BYTES + 1 - first
    entries = _entries(first, n_pages)
    # Told less than was asked for, nothing is claimed.
    if len(entries) != n_pages * _ENTRY_BYTES:
        return None
    flags = torch.frombuffer(entries, dtype=torch.int64) >> _FLAGS_SHIFT
    written = ((flags & _HAS_CONTENT) != 0) & ((flags & _OF_A_FILE) == 0)
    pages = written.nonzero().flatten().tolist()
    return [
        (max(0, low * _PAGE_BYTES - address % _PAGE_BYTES),
         min(n_bytes, high * _PAGE_BYTES - address % _PAGE_BYTES))
        for low, high in _joined(pages)
    ]  # fmt: skip


def _entries(first: int, n_pages: int) -> bytearray:
    """Read anew each time: a forked process has a map of its own."""
    file = os.open(_PAGEMAP, os.O_RDONLY)
    try:
        return bytearray(os.pread(file, n_pages * _ENTRY_BYTES, first * _ENTRY_BYTES))
    finally:
        os.close(file)


def _joined(pages: list[int]) -> Runs:
    """Neighbours in one run: first page, and the one behind the last."""
    if not pages:
        return []
    breaks = [(a + 1, b) for a, b in pairwise(pages) if b > a + 1]
    lows = [pages[0], *(b for _, b in breaks)]
    highs = [*(a for a, _ in breaks), pages[-1] + 1]
    return list(zip(lows, highs, strict=True))
