"""Host bytes that lie in files, the user's or our own, and come from there when they are needed.

Invariant: a read gives the values that the model's tensors have now: what the file holds, and over
it what was written to them since. No file is written after it was made: what is written through a
tensor over it stays in memory. The kernel says whether pages were written, and where it does not
tell, none is claimed to be unwritten. A file that somebody else changes is refused, not read. A
file of our own has no name from before its first byte: no process can meet another's, and the
system takes it back with its last use, however a process ends.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor, UntypedStorage
from torch.nn import functional as F

from tenure._errors import PagingError
from tenure._registries import NamedTensor
from tenure._show import progress
from tenure._text import describe_tensor, format_bytes

from ._file_link import Reader
from ._host_buffers import HostBuffers, point_at
from ._tensors import Extent, HostTensor, Unit

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
        written = written_parts(here, n_bytes) if tells_written() else [(0, n_bytes)]
        if written != [(0, n_bytes)]:
            self._read(address, offset, n_bytes)
        for low, high in written:
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
            before = bytes_of.sum().item(), written_parts(address, 2 * _PAGE_BYTES)
            bytes_of[_PAGE_BYTES] = 1
            after = written_parts(address, 2 * _PAGE_BYTES)
            return before == (0, []) and after == [(_PAGE_BYTES, 2 * _PAGE_BYTES)]
    except (OSError, ValueError):
        return False


def written_parts(address: int, n_bytes: int) -> list[tuple[int, int]]:
    """Return from where to where pages of a mapped range were written, as offsets.

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
    # in most models none, and this is asked for each unit of each pass
    if not written.any():
        return []
    # where written pages begin and where they end, by turns
    edges = F.pad(written.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    offsets = [page * _PAGE_BYTES - address % _PAGE_BYTES for page in edges]
    pairs = zip(offsets[::2], offsets[1::2], strict=True)
    return [(max(0, low), min(n_bytes, high)) for low, high in pairs]


@dataclass(frozen=True, slots=True)
class _UnitRange:
    """Bytes of a unit that lie in one piece.

    Attributes:
        start: where they begin in the unit.
        n_bytes: how many.
        address: where they are mapped, or lie, in host memory.
        file: what they are mapped from; None for memory.
        storage: keeps that memory.
    """

    start: int
    n_bytes: int
    address: int
    file: MappedFile | None
    storage: UntypedStorage

    def continues(self, other: _UnitRange) -> bool:
        """Return whether it is as far behind another one in the file as in the unit."""
        is_there = self.file is not None and self.file is other.file
        return is_there and self.address - self.start == other.address - other.start

    def read_into(self, address: int) -> None:
        if self.file is None:
            ctypes.memmove(address, self.address, self.n_bytes)
        else:
            self.file.read_into(address, self.address - self.file.address, self.n_bytes)

    def within(self, low: int, high: int) -> Iterator[_UnitRange]:
        """Yield its parts between two bytes of the unit, counted from the first of these."""
        begin, end = max(low, self.start), min(high, self.start + self.n_bytes)
        if begin < end:
            address = self.address + begin - self.start
            yield replace(self, start=begin - low, n_bytes=end - begin, address=address)


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The bytes of a unit, or a slice of them, yet to be read.

    Attributes:
        n_bytes: how many.
        parts: where they are; gaps between them hold nothing.
        trouble: why they can't be read, if that is known.
    """

    n_bytes: int
    parts: tuple[_UnitRange, ...]
    trouble: PagingError | None = None

    def __getitem__(self, where: slice) -> UnitBytes:
        low, high, _ = where.indices(self.n_bytes)
        parts = (inside for part in self.parts for inside in part.within(low, high))
        return UnitBytes(high - low, tuple(parts), self.trouble)

    def read_into(self, target: Tensor) -> None:
        """Read them into host memory.

        Args:
            target: uint8[n_bytes], in one piece.

        Raises:
            PagingError: a file has changed, or can't be read.
        """
        if self.trouble is not None:
            raise self.trouble
        for part in self.parts:
            part.read_into(target.data_ptr() + part.start)


class FileStore:
    """Units whose bytes lie in mapped files.

    Args:
        files: the files.

    Attributes:
        reader: the thread to read them on.
        host_bytes: host memory that holds weights: none, but for what was written to them.
        pinned_bytes: none of it.
    """

    host_bytes = pinned_bytes = 0

    def __init__(self, files: Iterable[MappedFile] = ()) -> None:
        self.reader = Reader()
        self._files = list(files)
        self._parts: dict[Unit, list[_UnitRange]] = {}

    def adopt(self, units: Iterable[Unit]) -> None:
        """Take units as they lie: over the files, or in memory."""
        for unit in units:
            parts = self._parts[unit] = []
            for extent, start in unit.starts():
                part = self._part(start, extent.n_bytes, extent.low_byte, extent.storage)
                # as in files of our own: read at once, with what is between them
                if parts and part.continues(parts[-1]):
                    first = parts.pop()
                    part = replace(first, n_bytes=part.start + part.n_bytes - first.start)
                parts.append(part)
            for host in unit.tensors:
                host.remember_home()

    def bytes_of(self, unit: Unit) -> UnitBytes:
        """Return the place of a unit's bytes."""
        try:
            return UnitBytes(unit.n_bytes, (*self._parts[unit], *self._moved(unit)))
        except PagingError as error:
            # For who uses the unit; it may only be fetched ahead now.
            return UnitBytes(unit.n_bytes, (), error)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """None: the model's own tensors lie over the files."""
        return iter(())

    def close(self) -> None:
        """Close the files and end the thread; the tensors of the model stay over the files."""
        self.reader.close()
        for file in self._files:
            file.close()

    def _part(self, start: int, n_bytes: int, low_byte: int, storage: UntypedStorage) -> _UnitRange:
        address = storage.data_ptr() + low_byte
        files = (file for file in self._files if file.offset_of(address) is not None)
        return _UnitRange(start, n_bytes, address, next(files, None), storage)

    def _moved(self, unit: Unit) -> Iterator[_UnitRange]:
        """Tensors that were given other memory since, as by ``parameter.data = other``."""
        for host in unit.tensors:
            if host.has_left:
                tensor, storage = _checked(host), host.tensor.untyped_storage()
                low_byte = tensor.data_ptr() - storage.data_ptr()
                # Read after the parts of the file, and over them.
                yield self._part(host.at_bytes, tensor.nbytes, low_byte, storage)


class SpillStore(FileStore):
    """Units that are moved from memory to a file of our own.

    Args:
        folder: where the file is made.
        model: whose units they are, for messages.
    """

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__()
        self._folder, self._model = folder, model

    def adopt(self, units: Iterable[Unit]) -> None:
        """Write units to a file, then point their tensors there and let the memory go.

        Raises:
            PagingError: the file can't be written; the tensors are where they were.
        """
        units = list(units)
        self._files.append(_spill(units, self._folder, self._model))
        super().adopt(units)


HostStore = HostBuffers | FileStore
"""Where the host bytes of units are."""


def _checked(host: HostTensor) -> Tensor:
    tensor = host.tensor
    alike = host.form == host.home_form and tensor.stride() == host.home_strides
    if not alike or not tensor.is_contiguous():
        raise PagingError(
            f"{host.name!r} was given other memory while it is paged, and is now "
            f"{describe_tensor(tensor)}, not laid out as its own. Write values with copy_(), or "
            "unpage() first."
        )
    return tensor


def checked_folder(folder: Path) -> Path:
    """Return a folder that files can be made in, made if it is missing.

    Raises:
        PagingError: it is none, or nothing can be made there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        nameless(folder).close()
    except (OSError, ValueError) as error:
        # A ValueError: what no system takes for a name.
        why = getattr(error, "strerror", None) or error
        raise PagingError(
            f"No file can be made in host={str(folder)!r}: {why}. The model is as "
            "before. Name a folder that this process may write to."
        ) from error
    return folder


def _spill(units: list[Unit], folder: Path, model: str) -> MappedFile:
    """Write units to a new file, and only then point their tensors there.

    Raises:
        PagingError: the file can't be written; the tensors are where they were.
    """
    n_bytes = sum(unit.n_bytes for unit in units)
    with writing(folder, model, n_bytes), nameless(folder) as file:
        _write(file, units)
        mapped = MappedFile(file, f"The file of {model} in {str(folder)!r}", is_ours=True)
    # Only now, when every byte is in the file: until here the model can be left as it was.
    for extent, begin, start in _places(units):
        point_at(extent, mapped.bytes_at(begin + start, extent.n_bytes), start)
    return mapped


@contextmanager
def writing(folder: Path, model: str, n_bytes: int) -> Iterator[None]:
    """Return a block that writes a file of a model.

    Raises:
        PagingError: it can't be written.
    """
    try:
        yield
    except OSError as error:
        free_bytes = shutil.disk_usage(folder).free
        raise PagingError(
            f"{format_bytes(n_bytes)} of {model} could not be written to host={str(folder)!r}: "
            f"{error.strerror}; {format_bytes(free_bytes)} are free there. The model is as before, "
            "and the file is gone. Free space, or name another folder."
        ) from error


def nameless(folder: Path) -> BinaryIO:
    """Return a new file in a folder that nobody else can meet."""
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, prefix="tenure-"))


def _write(file: BinaryIO, units: list[Unit]) -> None:
    n_bytes = sum(unit.n_bytes for unit in units)
    with progress("writing weights", n_bytes, in_bytes=True) as done:
        for extent, begin, start in _places(units):
            address = extent.storage.data_ptr() + extent.low_byte
            file.seek(begin + start)
            file.write((ctypes.c_ubyte * extent.n_bytes).from_address(address))
            done(extent.n_bytes)
    # What is empty can't be mapped.
    file.truncate(max(1, n_bytes))
    file.flush()


def _places(units: list[Unit]) -> Iterator[tuple[Extent, int, int]]:
    """Yield every extent with the offset of its unit in the file, and its own in the unit."""
    begin = 0
    for unit in units:
        for extent, start in unit.starts():
            yield extent, begin, start
        begin += unit.n_bytes
