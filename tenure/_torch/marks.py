"""Marks among the events of a session: what no allocation of a program can be taken for.

A mark is reported to the session as c10 reports an allocation, by the function that c10 has for its
allocators, with a size that no machine has: below ``_FIRST``. Where that function can't be reached
it is a range with a name; the session notes no other ranges, because noting them is turned off.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_torch: Any = torch
_C: Any = _torch._C._autograd
_FIRST = -(2**62)
_NAME = "tenure"
_LIBRARY = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
# int64_t is `long long` there, and `long` elsewhere
_INT64 = "x" if sys.platform == "darwin" else "l"
_REPORT = f"_ZN3c1027reportMemoryUsageToProfilerEPv{_INT64}mmNS_6DeviceE"
# A c10::Device is two bytes: its type, 0 for the CPU, and its index, which is -1.
_CPU = 0xFF00
_N_READY = 256


def as_event(number: int) -> int:
    """How mark ``number`` looks among the sizes of a session's events; numbers are 0 to 2**62."""
    return _FIRST - number


def marker() -> Callable[[int], None]:
    """What leaves a mark in this thread's session, which must be open, by its number."""
    return _report() or _name


def number_of(event: Any) -> int | None:
    """Which mark an event is that is no allocation; None for what else a session notes."""
    if event.kind() != "push":
        return None
    name, _, number = event.name().partition(" ")
    return int(number) if name == _NAME else None


def _name(number: int) -> None:
    _C._enable_record_function(True)
    try:
        _C._record_function_with_args_exit(_C._record_function_with_args_enter(f"{_NAME} {number}"))
    finally:
        _C._enable_record_function(False)


@functools.cache
def _report() -> Callable[[int], None] | None:
    """What reports a mark; None in a build of torch that has no such function.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/Allocator.h
    """
    try:
        # holds the interpreter's lock: no other thread of Python comes in between
        library: Any = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))
        function: Any = getattr(library, _REPORT)
    except (OSError, AttributeError):
        return None
    function.restype = None
    # made once: converting arguments takes longer than the call
    address, unknown, device = ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint16(_CPU)
    sizes = [ctypes.c_int64(as_event(number)) for number in range(_N_READY)]

    def report(number: int) -> None:
        size = sizes[number] if number < _N_READY else ctypes.c_int64(as_event(number))
        function(address, size, unknown, unknown, device)

    return report
