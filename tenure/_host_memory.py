"""The memory of the host that this process may still use: the machine's, its container's, its own.

A container is a group of processes (a cgroup of Linux) with a limit of its own, which the numbers
of the machine don't tell; past it the kernel ends the process without an exception. A process may
have a limit of its own on its address space (``RLIMIT_AS``), past which an allocation fails.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

resource: Any
try:
    import resource
# Windows has no such limits
except ImportError:
    resource = None


# what a version of cgroups calls a group's limit, its use, and the part of files that nobody uses
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V2 = "memory.max", "memory.current", "inactive_file"


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that the machine, containers and limits still allow this process.

    Args:
        root: where the files of the system lie.
    """
    left = [limit - address_space_bytes() for limit in address_space_limits()[:1]]
    free = (group.free_bytes for group in _groups(root))
    return max(0, min([int(psutil.virtual_memory().available), *free, *left]))


class GroupMemory(NamedTuple):
    """The memory of a container.

    Attributes:
        limit_bytes: what it may use.
        free_bytes: what it may use more.
    """

    limit_bytes: int
    free_bytes: int


def tightest_group(root: Path = Path("/")) -> GroupMemory | None:
    """Return the container of this process with the least free memory; None without a limit."""
    return min(_groups(root), key=lambda group: group.free_bytes, default=None)


def data_limit() -> int | None:
    """Return the lowest limit on this process's memory (``RLIMIT_DATA``, ``RLIMIT_AS``)."""
    if resource is None:
        return None
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    limits = [resource.getrlimit(kind)[0] for kind in kinds]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def address_space_bytes() -> int:
    """Return the bytes of address space of this process, which exceed the memory in use."""
    return int(psutil.Process().memory_info().vms)


def address_space_limits() -> list[int]:
    """Return the limits in bytes: the soft limit, then the hard limit."""
    if resource is None:
        return []
    limits = resource.getrlimit(resource.RLIMIT_AS)
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def limit_address_space(n_bytes: int) -> None:
    """Limit it, for good; one that is stricter already stays."""
    lowest = min([n_bytes, *address_space_limits()])
    resource.setrlimit(resource.RLIMIT_AS, (lowest, lowest))


def has_address_space_limits() -> bool:
    """Return whether the system knows such limits."""
    return resource is not None


def _groups(root: Path) -> Iterator[GroupMemory]:
    """Yield the groups that this process belongs to, and that have a limit.

    Each line of the file is one such as ``4:memory:/a`` or ``0::/b``. In a container the folder may
    be missing, because the group there is seen at the top.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _V1
        elif not controllers:
            top, names = root / "sys/fs/cgroup", _V2
        else:
            continue
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(top) and (group := _group_in(each, names)) is not None:
                yield group


def _group_in(folder: Path, names: tuple[str, str, str]) -> GroupMemory | None:
    limit_name, used_name, cache_name = names
    limit_bytes, used_bytes = _number(folder / limit_name), _number(folder / used_name)
    # the first version writes no limit as one of nearly 2**63 bytes
    if limit_bytes is None or used_bytes is None or limit_bytes >= 1 << 60:
        return None
    # files that were read and are not in use count as used, and make room when that is wanted
    cached = re.search(rf"^{cache_name} (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
    cache_bytes = int(cached[1]) if cached else 0
    return GroupMemory(limit_bytes, limit_bytes - max(0, used_bytes - cache_bytes))


def _number(file: Path) -> int | None:
    """Return a number in a file; None for ``max``, and for a file that is not there."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "surrogateescape")
    # another system, or not for this process to read
    except OSError:
        return ""


# --- what this process has taken


# kept, because to look up when a process began takes longer than to read its memory
_process = functools.lru_cache(maxsize=1)(psutil.Process)


def resident_bytes() -> int:
    """Return the memory of this process that lies in RAM."""
    return int(_process(os.getpid()).memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the most memory of this process that has been in RAM."""
    # getrusage counts the process that started this one as well: exec keeps its figure
    with suppress(OSError), open("/proc/self/status") as file:
        if found := re.search(r"VmHWM:\s+(\d+) kB", file.read()):
            return int(found[1]) * 1024
    if resource is None:
        figures: Any = psutil.Process().memory_info()  # `peak_wset` is there on Windows alone
        return int(figures.peak_wset)
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
