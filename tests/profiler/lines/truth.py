"""What the allocator did, from torch.profiler's own events: what the lines have to add up to."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tenure.profiler import LineProfiler


class Truth(NamedTuple):
    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int


def truth_of(call):
    """The sums and the peak of a call; it is run once before, so that nothing is made lazily."""
    call()
    gc.collect()
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    changes = [event.nbytes() for event in memory]
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    allocated = sum(change for change in changes if change > 0)
    return Truth(allocated, allocated - sum(changes), peak)


def profiled(call, *functions):
    """The line profiler of some functions on the CPU, after a call."""
    gc.collect()
    with LineProfiler(*functions, device="cpu") as profiler:
        call()
    return profiler


def lines_of(profiler, function):
    """(hits, allocated, freed, peak) by the line's place in its function."""
    first = function.__code__.co_firstlineno
    return {
        r.line - first: (r.hits, r.allocated_bytes, r.freed_bytes, r.peak_bytes)
        for r in profiler.records
        if r.function == function.__qualname__
    }


def sums_of(profiler):
    """The same numbers from the records of a line profiler."""
    records = profiler.records
    assert all(record.exact and record.peak_exact for record in records)
    return Truth(
        sum(record.allocated_bytes for record in records),
        sum(record.freed_bytes for record in records),
        max(record.peak_bytes for record in records),
    )


def check_lines_add_up(call, functions, capfd):
    """Lines of a call and of functions in it have what the allocator did; nothing is printed."""

    def wrapped():
        try:
            call()
        except ZeroDivisionError:
            return  # the exception, and the frames it held, end here

    truth = truth_of(wrapped)
    capfd.readouterr()  # torch's own profiler may print
    assert sums_of(profiled(wrapped, *functions, wrapped)) == truth
    assert truth.allocated_bytes > 0
    assert capfd.readouterr().err == ""
    assert not torch._C._autograd._profiler_enabled()
