"""Each line's bytes, against what the allocator itself says, for every way that code can run."""

import asyncio
import threading

import pytest
import torch
from torch.nn import functional as F

from tenure.profiler import LineProfiler

from ...programs import run_program
from ...threads import on_thread
from .truth import check_lines_add_up, lines_of, profiled, sums_of

X = torch.randn(64, 256, requires_grad=True)


def inner(y):
    z = y * 2
    return z + 1


def step():
    a = torch.ones(1000)
    y = F.softmax(X, -1)
    z = inner(y)
    z.sum().backward()
    for i in range(3):
        a = torch.ones(100 * (i + 1))
    X.grad = None
    return a


def recursive(n):
    t = torch.ones(10 * n + 1)
    u = recursive(n - 1) if n else t * 2
    return torch.cat([t, u])


def failing():
    t = torch.ones(64)
    try:
        divide(t)
    except ZeroDivisionError:
        t = t + 1
    divide(t)


def divide(t):
    u = t * 3
    return u / (1 // 0)


def generate(n):
    t = torch.ones(256)
    for i in range(n):
        t = torch.cat([t, t])
        yield t * i
    del t


def consume():
    total = torch.zeros(())
    for t in generate(3):
        total = total + t.sum()
    return total


def looping():
    kept = []
    for _ in range(5):
        kept.append(torch.ones(100))
        x = [torch.ones(j) for j in range(1, 4)]
    while len(kept) > 2:
        kept.pop()
    return x


def calling_often():
    x = torch.ones(1)
    return [negative(x) for _ in range(5000)][-3:]


def negative(x):
    return torch.neg(x)


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        (step, (step, inner)),
        (lambda: recursive(4), (recursive,)),
        (failing, (failing, divide)),
        (consume, (consume, generate)),
        (looping, (looping,)),
        (calling_often, (calling_often,)),
    ],
    ids=lambda value: "-".join(f.__name__ for f in value) if isinstance(value, tuple) else None,
)
def test_lines_add_up_to_what_the_allocator_did(call, functions, capfd):
    check_lines_add_up(call, functions, capfd)


def test_what_runs_outside_profiled_functions_is_nobodys():
    def caller():
        before = torch.ones(1000)
        part()
        return before

    def part():
        torch.ones(10)

    assert sums_of(profiled(caller, part)) == (40, 40, 4040)


def test_temporaries_inside_operations_are_seen():
    y, gradient = F.softmax(X.detach(), -1), torch.ones(()).expand(X.shape)

    def work():  # it needs a dense gradient; the copy never reaches Python
        return torch.ops.aten._softmax_backward_data(gradient, y, -1, torch.float32)

    lines = lines_of(profiled(work, work), work)
    assert lines == {1: (1, 2 * X.nbytes, X.nbytes, 2 * X.nbytes)}


def test_a_generator_that_is_closed_or_thrown_into():
    def careful():
        t = torch.ones(10)
        try:
            yield t
        except ZeroDivisionError:
            yield torch.ones(20)
        finally:
            torch.ones(30)

    def drive():
        first, second = careful(), careful()
        next(first)
        next(second)
        first.close()
        second.throw(ZeroDivisionError())
        second.close()

    lines = lines_of(profiled(drive, careful), careful)
    assert lines[5][:2] == (1, 80)
    assert lines[7][:3] == (2, 240, 240)


def test_interleaved_coroutines_are_kept_apart():
    async def work(n):
        t = torch.ones(n)
        await asyncio.sleep(0)
        u = torch.ones(n)
        await asyncio.sleep(0)
        return t, u

    async def both():
        return await asyncio.gather(work(10), work(1000))

    def call():
        asyncio.run(both())

    lines = lines_of(profiled(call, work), work)
    assert lines[1][:3] == (2, 4040, 0)
    assert lines[2][:3] == (2, 0, 0)
    assert lines[3][:3] == (2, 4040, 0)


def test_threads_are_kept_apart_and_added_up():
    barrier = threading.Barrier(3)

    def work(n):
        t = torch.ones(n)
        barrier.wait(10)
        return t * 2

    def call():
        threads = [threading.Thread(target=work, args=(n,)) for n in (10, 100, 1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lines = lines_of(profiled(call, work), work)
    assert lines[1][:3] == (3, 4 * 1110, 0)
    assert lines[3][0] == 3
    assert lines[3][1] == 4 * 1110 + 3 * (8 + 4)


def test_blocks_from_before_count_as_freed_where_they_are():
    old, graph = torch.ones(1000), torch.ones(10, requires_grad=True)
    graph.sum().backward()
    held = [old]
    del old

    def work():
        held.clear()
        graph.grad = None

    assert lines_of(profiled(work, work), work) == {1: (1, 0, 4000, 0), 2: (1, 0, 40, -4000)}


def test_blocks_made_in_between_count_as_freed_where_they_are():
    held = []

    def work():
        held.clear()

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        held.append(torch.ones(1000))
        held.append(on_thread(torch.ones, 100))
        work()
    assert lines_of(profiler, work) == {1: (1, 0, 4400, 4400)}


def test_the_end_of_a_frozen_tensor_is_seen():
    done = run_program("""
import gc, torch
from tenure.profiler import LineProfiler
KEPT = [torch.ones(100)]
def let_go():
    KEPT.clear()
gc.freeze()
with LineProfiler(let_go, device="cpu") as profiler:
    let_go()
print([r.freed_bytes for r in profiler.records])
""")
    assert (done.stdout, done.stderr) == ("[400]\n", "")


def test_a_peak_is_counted_from_where_the_profiler_was_enabled():
    held = []

    def work():
        held.append(torch.ones(100))

    before = torch.ones(1000)
    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work()
        work()
    with profiler:
        work()
    assert lines_of(profiler, work) == {1: (3, 1200, 0, 800)}
    assert before.sum() == 1000
