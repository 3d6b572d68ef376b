"""Which process each rank is, and which of those on this machine have ended.

Invariant: a rank is said to have ended only where that can be seen: on the same machine, and among
the same process ids. Of others nothing is said.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

# a process closes its connections before it is gone: a killed one by milliseconds, one that ends
# by itself by what Python and torch take to end
_GRACE_S = 5.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")


class Member(NamedTuple):
    """The process of a rank.

    Attributes:
        machine: the same for all processes that see each other.
        host: the name of the machine, for people.
        pid: its process id.
    """

    machine: str
    host: str
    pid: int


def own_member() -> str:
    """Return the description of this process for others, which `member_of` reads."""
    return json.dumps(Member(_machine(), socket.gethostname(), os.getpid()))


def member_of(told: str | bytes) -> Member:
    """Parse the description of another process."""
    return Member(*json.loads(told))


def ended_ranks(members: Iterable[Member]) -> dict[int, str]:
    """Return the ranks that have ended, and their processes in words.

    Called where a rank was lost: where none has ended yet, one may be about to.

    Args:
        members: the process of each rank.
    """
    machine, deadline = _machine(), time.monotonic() + _GRACE_S
    here = {rank: each for rank, each in enumerate(members) if each.machine == machine}
    while True:
        ended = {rank: each for rank, each in here.items() if _has_ended(each.pid)}
        if ended or time.monotonic() > deadline:
            return {
                rank: f"rank {rank} (process {each.pid} on {each.host})"
                for rank, each in ended.items()
            }
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _machine() -> str:
    try:
        # of two containers on one machine each has process ids of its own
        return f"{_BOOT.read_text().strip()} {os.readlink(_PIDS)}"
    # not on Linux
    except OSError:
        return str(uuid.getnode())
