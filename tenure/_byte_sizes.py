"""Bytes as people read and write them; without torch: a command line reads them at once."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from operator import index

from tenure._errors import ByteSizeError

_STEP = 1024
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SHOWN = _BINARY[:4]
_DECIMAL = ("KB", "MB", "GB", "TB", "PB", "EB")
_FACTORS = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1),
    **{unit.lower(): _STEP ** (power + 1) for power, unit in enumerate(_BINARY)},
    **{unit.lower(): 1000 ** (power + 1) for power, unit in enumerate(_DECIMAL)},
}
# Digits are bounded: no memory has more, and Python refuses to convert thousands of them.
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_SPELLINGS = 'Write an int, or a number and a unit, such as "64MiB" or "1.5 GiB".'


def format_bytes(n_bytes: int) -> str:
    """Spell a number of bytes with a binary unit and, from KiB up, one decimal.

    Args:
        n_bytes: any number of bytes; a difference may be negative.

    Example:
        >>> format_bytes(512), format_bytes(65_536), format_bytes(-1_572_864)
        ('512 B', '64.0 KiB', '-1.5 MiB')
    """
    if abs(n_bytes) < _STEP:
        return f"{n_bytes} B"
    value = float(n_bytes)
    power = 0
    # what is compared is what is shown: one byte less than a MiB would read 1024.0 KiB
    while power < len(_SHOWN) and abs(round(value, 1)) >= _STEP:
        value /= _STEP
        power += 1
    return f"{value:.1f} {_SHOWN[power - 1]}"


def format_bytes_as_torch(n_bytes: int) -> str:
    """Spell a number of bytes as torch's own out-of-memory texts do, so that both read alike.

    Example:
        >>> format_bytes_as_torch(512), format_bytes_as_torch(1536), format_bytes_as_torch(1 << 20)
        ('512 bytes', '1.50 KiB', '1024.00 KiB')

    Source: ``format_size`` in ``c10/cuda/CUDACachingAllocator.cpp``.
    """
    # more than a unit, and not as much: torch writes 1024.00 KiB for a MiB
    for power in (3, 2, 1):
        if n_bytes > _STEP**power:
            return f"{n_bytes / _STEP**power:.2f} {_BINARY[power - 1]}"
    return f"{n_bytes} bytes"


def parse_bytes(size: int | str) -> int:
    """Read a number of bytes as people write it.

    Args:
        size: an int, or a number and a unit in any case: ``B`` or none; ``KiB`` to ``EiB``, powers
            of 1024; ``KB`` to ``EB``, powers of 1000. A fraction of a byte is rounded.

    Raises:
        ByteSizeError: it is neither, or it is negative.

    Example:
        >>> parse_bytes("64MiB"), parse_bytes("1.5 KiB"), parse_bytes("2 GB"), parse_bytes(4096)
        (67108864, 1536, 2000000000, 4096)
    """
    return _parsed_text(size) if isinstance(size, str) else _checked_int(size)


def parse_share(text: object) -> float | None:
    """Read a share as people write it, such as ``"80%"``.

    Returns:
        The share; None where no per cent are written, and 0.0 where they can't be one.

    Example:
        >>> parse_share("80%"), parse_share("24GiB"), parse_share("120%"), parse_share("x%")
        (0.8, None, 0.0, 0.0)
    """
    if not (isinstance(text, str) and text.strip().endswith("%")):
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        return 0.0
    return share if 0 < share <= 1 else 0.0


def _parsed_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        meant = ""
        if match is not None and f"{match[2].lower()}ib" in _FACTORS:
            amount = f"{match[1]}{match[2].upper()}"
            meant = f" {amount} is {amount}iB, or {amount}B."
        raise ByteSizeError(f"{_shortened(text)} is not a number of bytes. {_SPELLINGS}{meant}")
    # Decimal, and not float: 0.1 TiB and 9 EiB are exact up to the one rounding
    return int((Decimal(match[1]) * factor).to_integral_value(ROUND_HALF_UP))


def _checked_int(size: object) -> int:
    try:
        n_bytes = index(size)  # type: ignore[arg-type]  # it raises TypeError, as it should
    except TypeError:
        n_bytes = None
    # True is a number to Python, and a switch to whoever wrote it
    if n_bytes is None or isinstance(size, bool):
        kind = type(size).__name__
        raise ByteSizeError(f"A number of bytes can't be read from a {kind}. {_SPELLINGS}")
    if n_bytes < 0:
        raise ByteSizeError(f"{n_bytes} is not a number of bytes: it is negative. {_SPELLINGS}")
    return n_bytes


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
