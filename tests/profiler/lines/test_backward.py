"""Python code that autograd's engine calls: the engine swaps the thread's state around it."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.profiler import LineProfiler
from tests.threads import on_thread

from .truth import check_lines_add_up, lines_of, profiled

N = 256


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x * x
        return y * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        square = x * x
        kept = [square]
        for _ in range(3):
            kept.append(kept[-1] + square)
        del square
        return gradient * kept[-2]


def hook(gradient):
    doubled = gradient * 2
    doubled = doubled + gradient
    return doubled - gradient


def chain():
    x = torch.ones(N, requires_grad=True)
    y = Cube.apply(Cube.apply(x) * 2)
    y.register_hook(hook)
    loss = torch.sin(y).sum()
    loss.backward()
    return x.grad


def reentrant():
    x = torch.ones(N, requires_grad=True)

    def again(gradient):
        with torch.enable_grad():
            inner = torch.ones(N, requires_grad=True)
            (inner * inner).sum().backward()
        return gradient + inner.grad

    y = x * 2
    y.register_hook(again)
    y.exp().sum().backward()
    return x.grad


def checkpointed():
    x = torch.ones(N, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
    y.sum().backward()
    return x.grad


def body(x):
    y = torch.sin(x)
    return torch.exp(y) * x


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        pytest.param(chain, [chain], id="only the outer"),
        pytest.param(chain, [chain, hook, Cube.forward, Cube.backward], id="all"),
        pytest.param(reentrant, [reentrant], id="a backward inside a backward"),
        pytest.param(checkpointed, [checkpointed, body], id="checkpoints"),
    ],
)
def test_lines_that_the_engine_calls_add_up_too(call, functions, capfd):
    check_lines_add_up(call, functions, capfd)


def test_each_line_of_a_backward_has_its_own_bytes():
    n, number = 4 * N, 8 + 4
    outer = LineProfiler(chain, Cube.backward, hook, device="cpu")
    alone = LineProfiler(Cube.backward, hook, device="cpu")
    for profiler in (outer, alone):
        with profiler:
            chain()
        own = lines_of(profiler, Cube.backward)
        assert {place: line[:2] for place, line in own.items()} == {
            2: (2, 0),
            3: (2, 2 * n),
            4: (2, 0),
            5: (8, 0),
            6: (6, 6 * n),
            7: (2, 0),
            8: (2, 2 * n),
        }
        lines = lines_of(profiler, hook)
        assert lines[1][:3] == (1, n + number, number)
        assert lines[2][:3] == (1, n, n)
        assert lines[3][:2] == (1, n)


def test_a_peak_inside_a_backward_is_seen_on_its_line_and_on_the_caller():
    def work():
        x = torch.ones(N, requires_grad=True)
        x.register_hook(spike)
        x.sum().backward()

    def spike(gradient):
        torch.ones(100 * N)
        torch.ones(10 * N)

    profiler = profiled(work, work, spike)
    peaks = {(r.function.rpartition(".")[2], r.line): r.peak_bytes for r in profiler.records}
    first, inside = work.__code__.co_firstlineno, spike.__code__.co_firstlineno
    most = peaks["spike", inside + 1]
    assert most >= 400 * N
    assert peaks["work", first + 3] == most
    assert peaks["spike", inside + 2] == most - 360 * N
    assert all(r.exact and r.peak_exact for r in profiler.records)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_counts_on_the_line_that_calls_it(capfd):
    compiled = torch.compile(body, backend="aot_eager")
    x = torch.ones(N, requires_grad=True)

    def step():
        loss = compiled(x).sum()
        loss.backward()
        x.grad = None

    check_lines_add_up(step, [step], capfd)


# --- marks tell lines apart that the engine calls, whatever the program itself allocates there


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


def test_lines_that_another_thread_has_not_told_yet_are_lower_bounds():
    found = []

    def work():
        torch.ones(100)
        torch.ones(100)
        found.extend(on_thread(lambda: [record.exact for record in profiler.records]))
        torch.ones(100)

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work()
    assert found[:3] == [False] * 3
    late = lines_of(profiler, work)
    assert [late[place][:3] for place in (1, 2, 4)] == [(1, 400, 400)] * 3
    are_exact = {r.line - work.__code__.co_firstlineno: r.exact for r in profiler.records}
    assert all(are_exact[place] for place in (1, 2, 4))


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

    profiler = profiled(work, work, hook)
    assert lines_of(profiler, hook)[2][:3] == (1000, 5000, 5000)
    assert lines_of(profiler, work)[5][:3] == (1000, 7000, 7000)
    assert all(record.exact for record in profiler.records)


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
    lines = lines_of(profiler, deep)
    assert lines[3][3] == lines[5][3] == 3010 + 1000
    assert lines[1][:3] == (301, 3010, 0)
    assert all(record.exact for record in profiler.records)
