"""Sizes and shares in words, as the simulated device's messages print them."""

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def format_bytes(n_bytes: int) -> str:
    """Render like torch's own out-of-memory text: `512 bytes`, `1.50 KiB`, `2.00 GiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        if n_bytes >= _UNITS[unit]:
            return f"{n_bytes / _UNITS[unit]:.2f} {unit}"
    return f"{n_bytes} bytes"


def parse_bytes(size: int | str) -> int:
    """Read `4096`, `"64KiB"` or `"1.5 MiB"` as a number of bytes.

    Raises:
        ValueError: the text is not a number with one of the units KiB, MiB, GiB.
    """
    if isinstance(size, int):
        return size
    unit = size[-3:]
    if unit not in _UNITS:
        raise ValueError(f"{size!r} is not a size; write an int or a number with KiB, MiB or GiB.")
    return round(float(size[:-3]) * _UNITS[unit])
