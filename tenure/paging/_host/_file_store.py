"""Host bytes that lie in files, and come from there each time that they are needed.

Invariant: a read gives the values that the model's tensors have now: what the file holds, and over
it what was written to them since. The host's memory holds what was written, and no more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, UntypedStorage

from tenure._errors import PagingError
from tenure._registries import NamedTensor
from tenure._text import describe_tensor

from .._model import HostTensor, Unit
from ._mapped_file import MappedFile
from ._reader import Reader
from ._spill import spill


@dataclass(frozen=True, slots=True)
class _Part:
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

    def within(self, low: int, high: int) -> Iterator[_Part]:
        """What of it lies between two bytes of the unit, counted from the first of them."""
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
    parts: tuple[_Part, ...]
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
        self._parts: dict[Unit, list[_Part]] = {}

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
        """Where the bytes of a unit are now."""
        try:
            return UnitBytes(unit.n_bytes, (*self._parts[unit], *self._moved(unit)))
        except PagingError as error:  # for who uses the unit; it may only be fetched ahead now
            return UnitBytes(unit.n_bytes, (), error)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """None: the model's own tensors lie over the files."""
        return iter(())

    def close(self) -> None:
        """Close the files and end the thread; the tensors of the model stay over the files."""
        self.reader.close()
        for file in self._files:
            file.close()

    def _part(self, start: int, n_bytes: int, low_byte: int, storage: UntypedStorage) -> _Part:
        address = storage.data_ptr() + low_byte
        files = (file for file in self._files if file.offset_of(address) is not None)
        return _Part(start, n_bytes, address, next(files, None), storage)

    def _moved(self, unit: Unit) -> Iterator[_Part]:
        """Tensors that were given other memory since, as by ``parameter.data = other``."""
        for host in unit.tensors:
            if host.has_left:
                tensor, storage = _checked(host), host.tensor.untyped_storage()
                low_byte = tensor.data_ptr() - storage.data_ptr()
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
        self._files.append(spill(units, self._folder, self._model))
        super().adopt(units)


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
