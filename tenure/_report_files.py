"""Files that are written whole or not at all, and a report as one: JSON, packed. Without torch.

What is read was written by anybody: whatever is no such file is refused in one line that names it.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tenure._errors import ReportFormatError

_MAGIC = b"\x1f\x8b"
# Unpacked: a file of a few bytes can stand for terabytes of zeros. A bracket or a comma begins each
# value, and a value takes up to 70 bytes of memory; a long run has a million of them.
_MOST_BYTES = 256 << 20
_MOST_VALUES = 10_000_000
_CHUNK_BYTES = 1 << 20
_MOST_NAMES = 1000
_BINARY = getattr(os, "O_BINARY", 0)


def write_whole(path: Path, data: bytes, *, replace: bool = True) -> Path:
    """Write a file under a temporary name beside it, and then name it.

    Args:
        path: of the file.
        data: all that is to be in it.
        replace: a file that has the name by now may go, and where a link has it, the file that it
            leads to, and its rights stay; else the next free name of ``name.2.tenure``,
            ``name.3.tenure`` and so on is taken.

    Returns:
        The path of the file that was written.

    Raises:
        OSError: it can't be written, or the name is that of a device or a pipe; there is nothing of
            it then.
    """
    if replace:
        path = Path(os.path.realpath(path))
        if is_no_file(path):
            raise FileExistsError(errno.EEXIST, "It is a device or a pipe, and no file", str(path))
    # no longer than any name that a file system takes
    name = path.parent / f".tenure-{secrets.token_hex(8)}"
    # the system takes off what this user's files are not to have
    number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        if replace and path.exists():
            shutil.copymode(path, name)
        return _named(name, path, replace=replace)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def is_no_file(path: Path) -> bool:
    """Return whether this path is neither a file nor a folder, such as a device or a pipe."""
    return path.exists() and not (path.is_file() or path.is_dir())


def write_facts(path: str | Path, facts: Mapping[str, object], *, replace: bool = True) -> Path:
    """Write a report, as `Report.to_dict` gives it, by `write_whole`.

    Args:
        path: of the file.
        facts: values that JSON has.
        replace: as `write_whole` takes it.

    Returns:
        The path of the file that was written.

    Raises:
        OSError: it can't be written; there is nothing of it then.
    """
    text = json.dumps(facts, separators=(",", ":"))
    return write_whole(Path(path), gzip.compress(text.encode(), 6, mtime=0), replace=replace)


def _named(written: Path, path: Path, *, replace: bool) -> Path:
    if replace:
        os.replace(written, path)
        return path
    for number in range(1, _MOST_NAMES + 1):
        chosen = path if number == 1 else path.with_suffix(f".{number}{path.suffix}")
        try:
            # both fail where the name is taken, which a rename does not; a link is never empty
            try:
                os.link(written, chosen)
            except FileExistsError:
                raise
            except OSError:
                _rename_to_new(written, chosen)
            else:
                os.unlink(written)
        except FileExistsError:
            continue
        return chosen
    raise FileExistsError(f"{path} and {_MOST_NAMES - 1} files beside it are there already")


def _rename_to_new(written: Path, chosen: Path) -> None:
    """Rename a file on a file system that has no links."""
    os.close(os.open(chosen, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        os.replace(written, chosen)
    except BaseException:
        os.unlink(chosen)
        raise


def _unpacked(path: str | Path) -> bytes:
    chunks, n_bytes, n_values = [], 0, 0
    with gzip.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            n_bytes += len(chunk)
            n_values += sum(map(chunk.count, (b",", b"[", b"{")))
            if n_bytes > _MOST_BYTES or n_values > _MOST_VALUES:
                raise ReportFormatError(
                    f"{path} is refused: it unpacks to more than {_MOST_BYTES >> 20} MiB, or to "
                    f"more than {_MOST_VALUES:,} values, and no report of tenure does."
                )
            chunks.append(chunk)
    return b"".join(chunks)


def read_facts(path: str | Path) -> dict[str, Any]:
    """Read what `write_facts` wrote.

    Raises:
        ReportFormatError: it is something else, or damaged.
        OSError: it can't be read.
    """
    try:
        facts = json.loads(_unpacked(path))
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, RecursionError) as error:
        if isinstance(error, ReportFormatError):
            raise
        raise ReportFormatError(
            f"{path} is no file of tenure, or it is damaged ({error}). Name one that "
            '"tenure run" wrote.'
        ) from None
    if not isinstance(facts, dict):
        raise ReportFormatError(f"{path} has no report in it. Name a file that tenure wrote.")
    return facts
