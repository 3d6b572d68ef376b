"""The memory of the machine, as far as this process may use it."""

from __future__ import annotations

from typing import Any

import psutil

from tenure._errors import AdaptiveUsageError
from tenure._host_memory import free_host_bytes

resource: Any
try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

_GIB = 1 << 30


def available_host_bytes() -> int:
    """Bytes that this process may still allocate: what is free, or less by RLIMIT_AS."""
    available_bytes = free_host_bytes()
    limit_bytes = _address_space_limit()
    if limit_bytes is None:
        return available_bytes
    used_bytes = int(psutil.Process().memory_info().vms)
    return max(0, min(available_bytes, limit_bytes - used_bytes))


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
    if resource is None:
        raise AdaptiveUsageError(
            "set_cpu_memory_limit() can't limit this process: the system has no RLIMIT_AS. "
            "memory_budget() limits what a block holds, on any system."
        )
    used_bytes = int(psutil.Process().memory_info().vms)
    if n_bytes < used_bytes:
        raise AdaptiveUsageError(
            f"set_cpu_memory_limit({gigabytes}) is less than this process uses already: "
            f"{used_bytes / _GIB:.2f} GiB of address space. Nothing was changed. Allow more."
        )
    limit_bytes = min([n_bytes, *(limit for limit in _limits() if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _checked_bytes(gigabytes: float) -> int:
    is_number = isinstance(gigabytes, int | float) and not isinstance(gigabytes, bool)
    if not is_number or not 0 < gigabytes < 1 << 30:
        raise AdaptiveUsageError(
            f"set_cpu_memory_limit() got {gigabytes!r}, which is no number of GiB. Give one, such "
            "as 8 or 0.5."
        )
    return int(gigabytes * _GIB)


def _limits() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    return soft, hard


def _address_space_limit() -> int | None:
    if resource is None:
        return None
    soft, _ = _limits()
    return None if soft == resource.RLIM_INFINITY else soft
