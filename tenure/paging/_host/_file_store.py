"""Host bytes that lie in files, the user's or our own, and come from there when they are needed.

Invariant: a read gives the values that the model's tensors have now: what the file holds, and over
it what was written to them since. The host's memory holds what was written, and no more. A file of
our own has no name from before its first byte: no process can meet another's, and the system takes
it back with its last use, however a process ends.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from torch import Tensor, UntypedStorage

from tenure._errors import PagingError
from tenure._registries import NamedTensor
from tenure._show import progress
from tenure._text import describe_tensor, format_bytes

from .._model import Extent, HostTensor, Unit
from ._host_buffers import HostBuffers, point_at
from ._mapped_file import MappedFile
from ._reader import Reader


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
    """

    def __init__(self, files: Iterable[MappedFile] = ()) -> None:
        self.reader = Reader()
        self._files = list(files)
        self._parts: dict[Unit, list[_UnitRange]] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory that holds weights: none, but for what was written to them."""
        return 0

    @property
    def pinned_bytes(self) -> int:
        """None of it."""
        return 0

    def adopt(self, units: Iterable[Unit]) -> None:
        """Take units as they lie: over the files, or in memory."""
        for unit in units:
            self._parts[unit] = [
                self._part(start, extent.n_bytes, extent.low_byte, extent.storage)
                for extent, start in unit.starts()
            ]
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
