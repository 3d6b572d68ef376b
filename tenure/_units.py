"""Bytes as people read them; the same number always has the same spelling."""

_STEP = 1024
_UNITS = ("KiB", "MiB", "GiB", "TiB")


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
    while power < len(_UNITS) and abs(round(value, 1)) >= _STEP:
        value /= _STEP
        power += 1
    return f"{value:.1f} {_UNITS[power - 1]}"
