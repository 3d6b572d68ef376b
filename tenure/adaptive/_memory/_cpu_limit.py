"""A limit that a process sets itself, for tests of what it does when the CPU has no more memory."""

from __future__ import annotations

from tenure._errors import AdaptiveUsageError
from tenure._host_memory import (
    address_space_bytes,
    has_address_space_limits,
    limit_address_space,
)

_GIB = 1 << 30


def set_cpu_memory_limit(gigabytes: float) -> None:
    """Limit the memory of this process, so that the CPU runs out of it and does not begin to swap.

    What is limited is the address space (``RLIMIT_AS``), which is larger than the memory in use:
    torch alone takes over 0.6 GiB of it, and a process that has CUDA open far more. A process can
    lower its limit, but never raise it again.

    Args:
        gigabytes: GiB of address space, such as ``8`` or ``0.5``; a limit that is stricter already
            stays.

    Raises:
        AdaptiveUsageError: it is no positive number, the process uses more already, or the system
            has no such limit, as Windows.

    Source: ``toma.cpu_memory.set_cpu_memory_limit``.
    """
    n_bytes = _checked_bytes(gigabytes)
    if not has_address_space_limits():
        raise AdaptiveUsageError(
            "set_cpu_memory_limit() can't limit this process: the system has no RLIMIT_AS. "
            "memory_budget() limits what a block holds, on any system."
        )
    used_bytes = address_space_bytes()
    if n_bytes < used_bytes:
        raise AdaptiveUsageError(
            f"set_cpu_memory_limit({gigabytes}) is less than this process uses already: "
            f"{used_bytes / _GIB:.2f} GiB of address space. Nothing was changed. Allow more."
        )
    limit_address_space(n_bytes)


def _checked_bytes(gigabytes: float) -> int:
    is_number = isinstance(gigabytes, int | float) and not isinstance(gigabytes, bool)
    if not is_number or not 0 < gigabytes < 1 << 30:
        raise AdaptiveUsageError(
            f"set_cpu_memory_limit() got {gigabytes!r}, which is no number of GiB. Give one, such "
            "as 8 or 0.5."
        )
    return int(gigabytes * _GIB)
