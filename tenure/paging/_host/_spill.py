"""Files of our own for models that were in memory: written once, nameless, and gone with them.

Invariant: no process can meet another's file, and none is left behind, however a process ends: the
file has no name from before its first byte, and the system takes it back with its last use.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import psutil

from tenure._callers import warn_user
from tenure._errors import PagingError, PagingWarning
from tenure._text import format_bytes

from .._model import Extent, Unit
from ._host_buffers import point_at
from ._mapped_file import MappedFile

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_MEMORY = ("tmpfs", "ramfs")


def checked_folder(folder: Path) -> Path:
    """A folder that files can be made in, made if it is missing.

    Raises:
        PagingError: it is none, or nothing can be made there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        nameless(folder).close()
    except (OSError, ValueError) as error:  # a ValueError: what no system takes for a name
        why = getattr(error, "strerror", None) or error
        raise PagingError(
            f"No file can be made in host={str(folder)!r}: {why}. The model is as "
            "before. Name a folder that this process may write to."
        ) from error
    if _is_in_memory(folder):
        warn_user(
            f"host={str(folder)!r} is a folder in memory: what is moved there takes as much of "
            "it as before. Name a folder on a disk.",
            PagingWarning,
        )
    return folder


def spill(units: list[Unit], folder: Path, model: str) -> MappedFile:
    """Write units to a new file, and only then point their tensors there.

    Raises:
        PagingError: the file can't be written; the tensors are where they were.
    """
    n_bytes = sum(unit.n_bytes for unit in units)
    with writing(folder, model, n_bytes), nameless(folder) as file:
        _reserve(file, n_bytes)
        _write(file, units)
        mapped = MappedFile(file, f"The file of {model} in {str(folder)!r}", is_ours=True)
    for extent, begin, start in _places(units):
        point_at(extent, mapped.bytes_at(begin + start, extent.n_bytes), start)
    return mapped


@contextmanager
def writing(folder: Path, model: str, n_bytes: int) -> Iterator[None]:
    """A block that writes a file of a model.

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
    """A new file in a folder that nobody else can meet."""
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, prefix="tenure-"))


def _reserve(file: BinaryIO, n_bytes: int) -> None:
    """Let a disk that is too full say so before anything is written."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    except OSError as error:
        if error.errno in _FULL:
            raise


def _write(file: BinaryIO, units: list[Unit]) -> None:
    for extent, begin, start in _places(units):
        address = extent.storage.data_ptr() + extent.low_byte
        file.seek(begin + start)
        file.write((ctypes.c_ubyte * extent.n_bytes).from_address(address))
    file.truncate(max(1, sum(unit.n_bytes for unit in units)))
    file.flush()


def _places(units: list[Unit]) -> Iterator[tuple[Extent, int, int]]:
    """Every extent, with where its unit begins in the file, and where in the unit it does."""
    begin = 0
    for unit in units:
        for extent, start in unit.starts():
            yield extent, begin, start
        begin += unit.n_bytes


def _is_in_memory(folder: Path) -> bool:
    """Whether the innermost file system that holds a folder is one of memory."""
    parents = {str(each) for each in (folder.resolve(), *folder.resolve().parents)}
    try:
        mounts = [each for each in psutil.disk_partitions(all=True) if each.mountpoint in parents]
    except OSError:  # some sandboxes do not tell
        return False
    innermost = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return innermost is not None and innermost.fstype in _IN_MEMORY
