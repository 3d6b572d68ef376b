"""Emptying the snapshot of a frame's variables, which Python below 3.13 keeps in the frame.

Invariant: the variables stand. A frame whose ``f_locals`` was read has a mark, upon which the
interpreter takes the snapshot for the variables when a trace function of the frame returns: a
missing name deletes its variable. `PyFrame_LocalsToFast` with 0 sets what the snapshot has, nothing
once it is empty, deletes nothing, and takes the mark off.
Source: https://github.com/python/cpython/blob/3.11/Objects/frameobject.c, PyFrame_LocalsToFast.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from types import FrameType
from typing import Any

from ._identities import Identities, IdentitySet


def _write_back() -> Any:
    if sys.version_info >= (3, 13):
        return None  # there are no snapshots
    prototype = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_int)
    return prototype(("PyFrame_LocalsToFast", ctypes.pythonapi))


_WRITE_BACK = _write_back()


# identities of snapshots, some of which are gone: another dictionary may have the same by now
_emptied: set[int] = set()


def forget(frame: FrameType, snapshot: dict[str, object]) -> None:
    """Empty the snapshot of a frame of optimized code, which nobody else holds."""
    _emptied.add(id(snapshot))
    steps: tuple[Callable[[], object], ...] = snapshot.clear, partial(_WRITE_BACK, frame, 0)
    # in one call of C, so that no thread whose trace function returns comes in between
    deque(map(call, steps), maxlen=0)


def take_out_emptied(heap: list[Any]) -> None:
    """Take the emptied snapshots out of a list; what is gone since is no longer remembered."""
    positions = Identities(heap).where(IdentitySet(_emptied))
    here = [position for position in positions if type(heap[position]) is dict]
    _emptied.intersection_update([id(heap[position]) for position in here])
    for position in reversed(here):
        if not heap[position]:
            del heap[position]
