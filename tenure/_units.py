"""Bytes as people read them."""


def format_bytes(n_bytes: int) -> str:
    """Format."""
    value = float(n_bytes)
    if abs(value) < 1024:
        return f"{n_bytes} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.1f} {unit}"
    raise AssertionError
