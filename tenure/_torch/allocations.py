"""What torch's allocators do on this thread, event by event, from torch's first profiler.

That profiler keeps its events in order, per thread, without clocks to line up and without anything
to convert afterwards, so a session can be read and begun anew at every line; the newer one takes
milliseconds for that, has one session per process, and crashes an interpreter that exits inside it.
A thread has one session at a time, of whichever profiler: ``begin`` is for a thread that has none.

Marks stand among the events of a session: what no allocation of a program can be taken for. One is
reported as c10 reports an allocation, by the function that c10 has for its allocators, with a size
that no machine has: below ``_FIRST``. Where that function can't be reached it is a range with a
name; the session notes no other ranges, because noting them is turned off.

Profilers of the program refuse to begin beside another session. While `announce` is in force, the
functions by which they begin call a function first.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

from torch.autograd import profiler, profiler_legacy

from . import bound, require
from .cpu_allocator import C10_LIBRARY
from .patches import Patch

_LINES = "figures by line of tenure.profiler"
_begin = bound("torch._C._autograd._enable_profiler_legacy", _LINES)
_end = bound("torch._C._autograd._disable_profiler_legacy", _LINES)
_record_functions = bound("torch._C._autograd._enable_record_function", _LINES)
_enter_range = bound("torch._C._autograd._record_function_with_args_enter", _LINES)
_exit_range = bound("torch._C._autograd._record_function_with_args_exit", _LINES)
_Config = bound("torch._C._profiler.ProfilerConfig", _LINES)
_State = bound("torch._C._profiler.ProfilerState", _LINES)
_ExperimentalConfig = bound("torch._C._profiler._ExperimentalConfig", _LINES)
_host_bytes = bound("torch._C._autograd.ProfilerEvent.cpu_memory_usage", _LINES)

is_profiling: Callable[[], bool] = bound("torch._C._autograd._profiler_enabled", _LINES)
"""Whether a session, tenure's or another's, is open on this thread."""

# events that say where a session begins and ends
_N_ENDS = 2
_FIRST = -(2**62)
_NAME = "tenure"
# int64_t is `long long` there, and `long` elsewhere
_INT64 = "x" if sys.platform == "darwin" else "l"
_REPORT = f"_ZN3c1027reportMemoryUsageToProfilerEPv{_INT64}mmNS_6DeviceE"
# A c10::Device is two bytes: its type, 0 for the CPU, and its index, which is -1.
_CPU = 0xFF00
_N_READY = 256


class Changes(NamedTuple):
    """What was allocated (positive) and freed (negative), in bytes, in order.

    Attributes:
        cpu: in host memory; the marks stand among it, as ``as_event`` gives them.
        cuda: in the memory of all CUDA or ROCm devices together.
    """

    cpu: list[int]
    cuda: list[int]


def begin() -> None:
    """Open a session on this thread; operations are not noted in it, only allocations."""
    _begin(_config())
    _record_functions(False)


def turn() -> Changes | None:
    """Return the events since ``begin`` or the last turn; None if someone ended the session."""
    try:
        lists = _end()
    # "Can't disable profiler when it's not running"
    except RuntimeError:
        _record_functions(True)
        return None
    _begin(_config())
    return _changes(lists)


def end() -> Changes | None:
    """End the session, and return the events since ``begin`` or the last turn."""
    _record_functions(True)
    try:
        return _changes(_end())
    except RuntimeError:
        return None


def _changes(lists: list[list[Any]]) -> Changes:
    """There is a list for each thread that worked for this one, as a CUDA backward has."""
    if len(lists) != 1:
        return _all_changes(sorted(chain.from_iterable(lists), key=lambda event: event.start_us()))
    (events,) = lists
    cpu = list(filter(None, map(_host_bytes, events)))
    # most sessions have nothing else than where they begin and end
    return Changes(cpu, []) if len(cpu) + _N_ENDS == len(events) else _all_changes(events)


def _all_changes(events: Iterable[Any]) -> Changes:
    cpu, cuda = [], []
    for event in events:
        n_bytes = event.cpu_memory_usage()
        if n_bytes:
            cpu.append(n_bytes)
        elif n_bytes := event.cuda_memory_usage():
            cuda.append(n_bytes)
        elif (number := number_of(event)) is not None:
            cpu.append(as_event(number))
    return Changes(cpu, cuda)


def as_event(number: int) -> int:
    """Return the size that stands for mark ``number`` among events; numbers are 0 to 2**62."""
    return _FIRST - number


def marker() -> Callable[[int], None]:
    """Return a function that marks this thread's open session with a number."""
    return _report() or _name


def number_of(event: Any) -> int | None:
    """Return which mark an event is that is no allocation; None for what else a session notes."""
    if event.kind() != "push":
        return None
    name, _, number = event.name().partition(" ")
    return int(number) if name == _NAME else None


def _name(number: int) -> None:
    _record_functions(True)
    try:
        _exit_range(_enter_range(f"{_NAME} {number}"))
    finally:
        _record_functions(False)


@functools.cache
def _report() -> Callable[[int], None] | None:
    """Return the function that reports a mark; None if this build of torch has none.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/Allocator.h
    """
    try:
        # holds the interpreter's lock: no other thread of Python comes in between
        library: Any = ctypes.PyDLL(C10_LIBRARY)
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


def announce(make_way: Callable[[], None]) -> Callable[[], None]:
    """Call a function on its thread before a profiler begins, until the returned one is called."""
    _making_way.append(make_way)
    end = ExitStack()
    end.callback(_making_way.remove, make_way)
    for beginnings in _BEGINNINGS:
        end.enter_context(beginnings.block())
    return end.close


def _announcing(begin: Any) -> Any:
    def announce_and_begin(*args: Any, **kwargs: Any) -> Any:
        for make_way in [*_making_way]:
            make_way()
        return begin(*args, **kwargs)

    return announce_and_begin


_making_way: list[Callable[[], None]] = []
# torch calls none that it has dropped: its own profiler then refuses to begin, and says so
_BEGINNINGS = (
    Patch(profiler, dict.fromkeys(("_prepare_profiler", "_enable_profiler"), _announcing)),
    Patch(profiler_legacy, {"_enable_profiler_legacy": _announcing}),
)


@functools.cache
def _config() -> Any:
    # a session that could not be read or ended would stay open: nothing is begun without these
    require(_begin, _end, _record_functions, _enter_range, _exit_range, _host_bytes)
    # of input shapes, memory, stacks, flops and modules, memory is all that is wanted
    return _Config(_State.CPU, False, True, False, False, False, _ExperimentalConfig())
