"""A file whose bytes are read as they are, and seen by tensors that may be written.

Invariant: the file is never written. What is written through a tensor over it stays in memory, and
is what the next read gives: the kernel says whether pages were written, and where it does not tell,
none is claimed to be unwritten. A file that somebody else changes is refused, not read.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from tenure._errors import PagingError
from tenure._text import format_bytes

# Without it Linux refuses to map a file larger than the memory there is, though few pages of it
# will ever be written; Python before 3.13 does not name it.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

_Seen = tuple[int, int, int]
"""Size, time of modification, and time of change, which no program can set."""

_PAGE_BYTES = mmap.PAGESIZE
_ENTRY_BYTES = 8
_PAGEMAP = "/proc/self/pagemap"
# The three highest bits of an entry, https://docs.kernel.org/admin-guide/mm/pagemap.html
_FLAGS_SHIFT = 61
_OF_A_FILE, _HAS_CONTENT = 0b001, 0b110


class MappedFile:
    """A file, open for reading until this is closed or gone.

    Args:
        file: the open file; it may be closed then.
        name: what messages call it.
        is_ours: whether nobody else can reach it; then it is never found changed.

    Attributes:
        name: what messages call it.
        n_bytes: its size.
        address: where it is mapped.
    """

    def __init__(self, file: BinaryIO, name: str, *, is_ours: bool = False) -> None:
        self.name = name
        self._is_ours = is_ours
        # The caller closes its own; this one is read from as long as the model is paged.
        self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False
        self._path = os.path.abspath(file.name) if isinstance(file.name, str) else ""
        self._seen, self._named = self._look(), self._name_of()
        self.n_bytes = self._seen[0]
        self._memory = _mapped(self._descriptor, self.n_bytes)
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
        """Return a tensor over part of the file in its own storage; it keeps the mapping alive."""
        n_elements = torch.Size(shape).numel()
        if not n_elements:
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=n_elements, offset=offset)
        return flat.view(shape)

    def bytes_at(self, offset: int, n_bytes: int) -> Tensor:
        """Return uint8[n_bytes], as ``tensor`` does."""
        return self.tensor(torch.uint8, (n_bytes,), offset)

    def copy_of(self, offset: int, n_bytes: int) -> bytes:
        """Part of the file, in memory of its own."""
        return self._memory[offset : offset + n_bytes]

    def offset_of(self, address: int) -> int | None:
        """Return which byte of the file is mapped at an address, if any."""
        offset = address - self.address
        return offset if 0 <= offset < self.n_bytes else None

    def read_into(self, address: int, offset: int, n_bytes: int) -> None:
        """Copy part of the file to memory, with all that was written to tensors over it.

        Args:
            address: of the memory.
            offset: where in the file the part begins.
            n_bytes: its size.

        Raises:
            PagingError: the file has changed, or can't be read.
        """
        self.check_unchanged()
        here = self.address + offset
        # Read, not copied from the mapping: the pages of the file would count as this process's
        # memory, and stay. Only what was written to tensors over it is in the mapping alone.
        low, high = written_range(here, n_bytes) if tells_written() else (0, n_bytes)
        if high - low < n_bytes:
            self._read(address, offset, n_bytes)
        ctypes.memmove(address + low, here + low, high - low)
        # Once more: it may have been cut or written while it was read.
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Refuse a file that was written or cut since it was opened.

        Raises:
            PagingError: it was.
        """
        now = self._seen if self._is_ours else self._look()
        if now == self._seen:
            return
        named = self._name_of()
        if now[:-1] == self._seen[:-1] and named != self._named:
            # A new name or other permissions change the time of change, and no byte.
            self._seen, self._named = now, named
            return
        was, is_now = format_bytes(self._seen[0]), format_bytes(now[0])
        raise PagingError(
            f"{self.name} was changed while a model is paged from it (it had {was}, and has "
            f"{is_now}): its weights can't be told from others any more, and none were used. "
            "Load the model anew. To replace such a file, write another and rename it."
        )

    def close(self) -> None:
        """Close the file; tensors over it stay as they are."""
        self._close()

    def _look(self) -> _Seen:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _name_of(self) -> tuple[object, ...]:
        """Permissions, owner and names: if they change, the time of change does, and no byte."""
        status = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path).st_ino
        except OSError:
            there = None
        return status.st_mode, status.st_uid, status.st_gid, status.st_nlink, there

    def _read(self, address: int, offset: int, n_bytes: int) -> None:
        target = memoryview((ctypes.c_ubyte * n_bytes).from_address(address)).cast("B")
        while target:
            try:
                n_read = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise PagingError(
                    f"{self.name} can't be read at byte {offset}: {error.strerror}. No weights of "
                    "it were used. Check the disk, then call the model again."
                ) from error
            if not n_read:
                self.check_unchanged()
                raise PagingError(
                    f"{self.name} ends at byte {offset}, before its weights do. No weights of it "
                    "were used. Fetch or save it again, and load the model anew."
                )
            target, offset = target[n_read:], offset + n_read


def _mapped(descriptor: int, n_bytes: int) -> mmap.mmap:
    """Memory that shows a file and takes writes for itself."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(descriptor, n_bytes, access=mmap.ACCESS_COPY)
    flags, protection = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(descriptor, n_bytes, flags=flags, prot=protection)


@functools.cache
def tells_written() -> bool:
    """Return whether this kernel tells a page that was written from one that was only read."""
    if not hasattr(os, "preadv"):
        return False
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(2 * _PAGE_BYTES)
            memory = mmap.mmap(file.fileno(), 2 * _PAGE_BYTES, access=mmap.ACCESS_COPY)
            bytes_of = torch.frombuffer(memory, dtype=torch.uint8)
            address = bytes_of.data_ptr()
            before = bytes_of.sum().item(), written_range(address, 2 * _PAGE_BYTES)
            bytes_of[_PAGE_BYTES] = 1
            after = written_range(address, 2 * _PAGE_BYTES)
            return before == (0, (0, 0)) and after == (_PAGE_BYTES, 2 * _PAGE_BYTES)
    except (OSError, ValueError):
        return False


def written_range(address: int, n_bytes: int) -> tuple[int, int]:
    """Return from where to where pages of a mapped range were written, as offsets; (0, 0) if none.

    Raises:
        ValueError: the kernel does not tell.
    """
    first = address // _PAGE_BYTES
    n_pages = (address + n_bytes - 1) // _PAGE_BYTES + 1 - first
    # Opened anew each time: a forked process has a map of its own.
    file = os.open(_PAGEMAP, os.O_RDONLY)
    try:
        entries = bytearray(os.pread(file, n_pages * _ENTRY_BYTES, first * _ENTRY_BYTES))
    finally:
        os.close(file)
    if len(entries) != n_pages * _ENTRY_BYTES:
        raise ValueError(f"{_PAGEMAP} tells less than was asked for")
    flags = torch.frombuffer(entries, dtype=torch.int64) >> _FLAGS_SHIFT
    written = ((flags & _HAS_CONTENT) != 0) & ((flags & _OF_A_FILE) == 0)
    pages = [int(page) * _PAGE_BYTES - address % _PAGE_BYTES for page in written.nonzero()]
    return (max(0, pages[0]), min(n_bytes, pages[-1] + _PAGE_BYTES)) if pages else (0, 0)
