"""Pickles that hold lists, dictionaries, text and numbers, and nothing else.

Invariant: a file is read and never run, and reading it takes time and memory in proportion to its
size. So its opcodes are checked before the unpickler of Python sees any of them.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any, NoReturn

from tenure._errors import ReportFormatError

_BUFFER_BYTES = 1 << 20
# https://github.com/python/cpython/blob/main/Lib/pickletools.py describes the opcodes.
_INT = rb"(?:K.|M..|J....)"
# Of at most 64 bits: the hash of a longer number can be chosen, so that all of them collide.
_LONG_INT = b"|".join(rb"\x8a\x%02x.{%d}" % (n, n) for n in range(10))
# Between any two opcodes. Python ends one at 64 KiB; the unpickler allocates what one says it has,
# and this is less than 16 MiB.
_FRAME = rb"\x95...\0\0\0\0\0"
# Two numbers are a tuple, as the number of a memory pool is. No tuple has another in it: their hash
# calls itself at each level, and some thousands of levels end the process.
_CHECKED = re.compile(
    rb"(?:[\])}(aesu\x94N\x88\x89]|[hq\x80].|j....|G.{8}|%b(?:%b)?%b(?:%b)?\x86|%b|%b|%b)*+"
    % (_INT, _FRAME, _INT, _FRAME, _INT, _LONG_INT, _FRAME),
    re.DOTALL,
)
_LONG_BINPUT = ord("r")
_TEXT = {0x8C: 1, ord("X"): 4, 0x8D: 8}
"""The opcodes of text, and in how many bytes its length is told."""
# the end, and those at which `_OnlyData` raises: nothing behind them is read
_LAST = b".ci\x93PQ"


def load_plain(data: bytes, path: str, done: Callable[[int], None]) -> Any:
    """Read a pickle.

    Args:
        data: all of its file.
        path: of the file, for errors.
        done: called with how many bytes more were read.

    Raises:
        ReportFormatError: it holds something else, or is damaged.
    """
    try:
        _check(data)
        return _OnlyData(io.BufferedReader(_Told(data, done), _BUFFER_BYTES), path).load()
    except ReportFormatError:
        raise
    # what a damaged pickle raises depends on where it is damaged
    except Exception as error:
        raise ReportFormatError(
            f"{path} is a damaged pickle, or no snapshot of torch ({type(error).__name__}: "
            f"{error}). Write it anew with torch.cuda.memory._dump_snapshot()."
        ) from None


def _check(data: bytes) -> None:
    """Make sure that the opcodes are those of plain data, and that no size is beyond the file's.

    Raises:
        ValueError: they are not.
        IndexError: the data end before the pickle does.
    """
    place = 0
    while True:
        matched = _CHECKED.match(data, place)
        assert matched is not None
        place = matched.end()
        opcode = data[place]
        place += 1
        if opcode in _LAST:
            return
        if opcode in _TEXT:
            end = place + _TEXT[opcode]
            place = end + int.from_bytes(data[place:end], "little")
        elif opcode == _LONG_BINPUT:
            # each thing with a number has an opcode or more before this one
            _check_size(int.from_bytes(data[place : place + 4], "little"), place)
            place += 4
        else:
            raise ValueError(f"byte {place - 1} is an opcode that plain data do not have")
        _check_size(place, len(data))


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"a size of {size} is beyond the {most} bytes that there are")


class _Told(io.BytesIO):
    """Bytes that tell how many of them were read."""

    def __init__(self, data: bytes, done: Callable[[int], None]) -> None:
        super().__init__(data)
        self._done = done

    def readinto(self, buffer: Any, /) -> int:
        n_bytes = super().readinto(buffer)
        self._done(n_bytes)
        return n_bytes


class _OnlyData(pickle.Unpickler):
    """Reads what needs no class and no function."""

    def __init__(self, file: io.BufferedReader[Any], path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ReportFormatError(
            f"{self._path} is refused: the pickle names {module}.{name}, which would run when it "
            "is read. A snapshot of torch names nothing; don't open this file."
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ReportFormatError(
            f"{self._path} is refused: it refers to objects outside of it, and a snapshot of torch "
            "does not."
        )
