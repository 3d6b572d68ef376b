"""Files that are written whole or not at all, and a report as one: JSON, packed. Without torch.

What is read was written by anybody: whatever is no such file is refused in one line that names it.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tenure._errors import ReportFormatError

_MAGIC = b"\x1f\x8b"
# Unpacked: a file of a few bytes can stand for terabytes of zeros.
_MOST_BYTES = 1 << 30
_MOST_NAMES = 1000
# of a whole number: bytes and nanoseconds have fewer, and a float can hold it
_MOST_DIGITS = 100
_BINARY = getattr(os, "O_BINARY", 0)


def write_whole(path: Path, data: bytes, *, replace: bool = True) -> Path:
    """Write a file under a temporary name beside it, and then name it.

    Args:
        path: of the file.
        data: all that is to be in it.
        replace: a file that has the name by now may go; else the next free name of
            ``name.2.tenure``, ``name.3.tenure`` and so on is taken.

    Returns:
        The path of the file that was written.

    Raises:
        OSError: it can't be written; there is nothing of it then.
    """
    name = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    # the system takes off what this user's files are not to have
    number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        return _named(name, path, replace=replace)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


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
            # fails where the name is taken, which a rename does not; a rename then keeps it
            os.close(os.open(chosen, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        try:
            os.replace(written, chosen)
        except BaseException:
            os.unlink(chosen)
            raise
        return chosen
    raise FileExistsError(f"{path} and {_MOST_NAMES - 1} files beside it are there already")


def is_packed(path: str | Path) -> bool:
    """Whether a file begins as one that `write_facts` wrote.

    Raises:
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def read_facts(path: str | Path) -> dict[str, Any]:
    """Read what `write_facts` wrote.

    Raises:
        ReportFormatError: it is something else, or damaged.
        OSError: it can't be read.
    """
    try:
        with gzip.open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ReportFormatError(f"{path} unpacks to more than 1 GiB, and no report does.")
        facts = json.loads(text, parse_int=_whole, parse_constant=_no_number)
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
