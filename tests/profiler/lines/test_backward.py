"""Python code that autograd's engine calls: the engine swaps the thread's state around it."""

import pytest
import torch

from tenure.profiler import LineProfiler

from .truth import check_lines_add_up, lines_of

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

    profiler = LineProfiler(work, spike, device="cpu")
    with profiler:
        work()
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
