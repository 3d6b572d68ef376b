"""What torch's allocators do on this thread, event by event, from torch's first profiler.

That profiler keeps its events in order, per thread, without clocks to line up and without anything
to convert afterwards, so a session can be read and begun anew at every line; the newer one takes
milliseconds for that, has one session per process, and crashes an interpreter that exits inside it.
A thread has one session at a time, of whichever profiler: ``begin`` is for a thread that has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as _profiler  # noqa: F401  # it must be whole before others wrap it

from .marks import as_event, marker, number_of

_C: Any = torch._C
_begin = _C._autograd._enable_profiler_legacy
_end = _C._autograd._disable_profiler_legacy
_record_functions = _C._autograd._enable_record_function

is_profiling = _C._autograd._profiler_enabled
"""Whether a session, tenure's or another's, is open on this thread."""

_host_bytes = _C._autograd.ProfilerEvent.cpu_memory_usage
_N_ENDS = 2  # events that say where a session begins and ends

_CONFIG = _C._profiler.ProfilerConfig(
    _C._profiler.ProfilerState.CPU,
    False,  # input shapes
    True,  # memory: all that is wanted
    False,  # stacks
    False,  # flops
    False,  # modules
    _C._profiler._ExperimentalConfig(),
)


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
    _begin(_CONFIG)
    _record_functions(False)


def turn() -> Changes | None:
    """What happened since ``begin`` or the last turn; None if someone has ended the session."""
    try:
        lists = _end()
    except RuntimeError:  # "Can't disable profiler when it's not running"
        _record_functions(True)
        return None
    _begin(_CONFIG)
    return _changes(lists)


def end() -> Changes | None:
    """What happened since ``begin`` or the last turn, and the end of the session."""
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


def works() -> bool:
    """Whether a temporary, a turn, a mark and a block of an earlier turn come out right."""
    if is_profiling():
        return True  # nothing can be tried now; turns that fail say so
    begin()
    kept = torch.empty(64, dtype=torch.uint8, device="cpu")
    torch.UntypedStorage(32, device="cpu")
    first = turn()
    marker()(1)
    del kept
    second = end()
    seen = first == ([64, 32, -32], []) and second == ([as_event(1), -64], [])
    return seen and not is_profiling()
