"""Sizes and shares in words, as the simulated device's messages print them."""

import re

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(KiB|MiB|GiB)")


def format_bytes(n_bytes: int) -> str:
    """Render like torch's own out-of-memory text: `512 bytes`, `1.50 KiB`, `2.00 GiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        if n_bytes >= _UNITS[unit]:
            return f"{n_bytes / _UNITS[unit]:.2f} {unit}"
    return f"{n_bytes} bytes"


def parse_bytes(size: int | str) -> int:
    """Read `4096`, `"64KiB"` or `"1.5 MiB"` as a number of bytes.

    Raises:
        ValueError: neither an int from 0 nor a number with one of the units KiB, MiB, GiB.
    """
    if isinstance(size, int) and size >= 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None:
        raise ValueError(
            f"{size!r} is not a size; write an int or a number with KiB, MiB or GiB, not below 0."
        )
    return round(float(found[1]) * _UNITS[found[2]])
