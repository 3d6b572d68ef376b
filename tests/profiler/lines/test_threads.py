"""Marks tell apart lines that the engine calls, whatever the program itself allocates there."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.profiler import LineProfiler
from tests.threads import on_thread

N_LINES = 6
STEPS = st.one_of(
    st.sampled_from([1, 2, 1007, 1009, 1011, 1013, 1015, 1017, 2007, 2**20]),
    st.integers(1000, 1030),
    st.integers(1, 5000),
)
"""Bytes to make; what a step before has made may be freed instead, or at once."""
PROGRAMS = st.lists(
    st.lists(st.tuples(STEPS, st.sampled_from(["keep", "at once", "free"])), max_size=5),
    min_size=N_LINES,
    max_size=N_LINES,
)


class Ledger:
    """Does what a program says on each line, and notes what that must cost."""

    def __init__(self, program):
        self.program, self.held = program, []
        self.lines = [[0, 0] for _ in program]

    def run(self, i):
        for n_bytes, way in self.program[i]:
            if way == "free":
                if self.held:
                    self.lines[i][1] += self.held.pop(0).nbytes()
                continue
            block = torch.UntypedStorage(n_bytes, device="cpu")
            self.lines[i][0] += n_bytes
            if way == "keep":
                self.held.append(block)
            else:
                self.lines[i][1] += n_bytes
            del block


def found_by(program, in_a_hook):
    ledger = Ledger(program)

    def lines(_):
        ledger.run(0)
        ledger.run(1)
        ledger.run(2)
        ledger.run(3)
        ledger.run(4)
        ledger.run(5)

    def work():
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lines)
        x.sum().backward()

    # `work` too, so that the session that it begins is lent to the engine while the hook runs
    profiler = LineProfiler(lines, work, device="cpu")
    with profiler:
        work() if in_a_hook else lines(None)
    found = [r for r in profiler.records if r.function == lines.__qualname__]
    assert all(record.exact and record.peak_exact for record in found)
    return ledger.lines, [[r.allocated_bytes, r.freed_bytes] for r in found]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(PROGRAMS, st.booleans())
def test_lines_have_what_a_ledger_says_whatever_is_made_and_freed(program, in_a_hook):
    gc.disable()  # what other examples left must not end on these lines
    try:
        expected, found = found_by(program, in_a_hook)
    finally:
        gc.enable()
    assert found == expected


def bytes_of(profiler, function):
    """(hits, allocated, freed, exact) by the line's place in its function."""
    first = function.__code__.co_firstlineno
    return {
        r.line - first: (r.hits, r.allocated_bytes, r.freed_bytes, r.exact)
        for r in profiler.records
        if r.function == function.__qualname__
    }


def test_lines_that_another_thread_has_not_told_yet_are_lower_bounds():
    found = []

    def work():
        torch.ones(100)
        torch.ones(100)
        found.append(on_thread(bytes_of, profiler, work))
        torch.ones(100)

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work()
    (early,) = found
    assert [early[place][3] for place in (1, 2, 3)] == [False] * 3
    late = bytes_of(profiler, work)
    assert [late[place] for place in (1, 2, 4)] == [(1, 400, 400, True)] * 3


def test_more_marks_than_are_ready_and_more_lines_than_a_session_holds():
    def hook(gradient):
        for _ in range(1000):
            torch.empty(5, dtype=torch.uint8)

    def work():
        x = torch.ones(1, requires_grad=True)
        x.register_hook(hook)
        x.sum().backward()
        for _ in range(1000):
            torch.empty(7, dtype=torch.uint8)

    profiler = LineProfiler(work, hook, device="cpu")
    with profiler:
        work()
    assert bytes_of(profiler, hook)[2] == (1000, 5000, 5000, True)
    assert bytes_of(profiler, work)[5] == (1000, 7000, 7000, True)


def test_a_peak_reaches_every_caller_of_a_deep_recursion():
    def deep(n):
        block = torch.UntypedStorage(10, device="cpu")
        if n:
            deep(n - 1)
        else:
            torch.UntypedStorage(1000, device="cpu")
        return block

    profiler = LineProfiler(deep, device="cpu")
    with profiler:
        deep(300)
    peaks = {r.line - deep.__code__.co_firstlineno: r.peak_bytes for r in profiler.records}
    assert peaks[3] == peaks[5] == 3010 + 1000
    assert bytes_of(profiler, deep)[1] == (301, 3010, 0, True)
