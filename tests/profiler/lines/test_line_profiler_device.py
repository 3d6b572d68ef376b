"""The same columns on an accelerator: the simulated one, and CUDA where there is a GPU."""

import sys
import threading
from collections.abc import Callable

import pytest
import torch

from tenure.profiler import LineProfiler, ProfilerUsageError

from .truth import lines_of


def work():
    x = torch.ones(256, device="sim")
    host = torch.ones(10_000)
    y = torch.cat([x, x])
    del x
    return y, host


EXPECTED = {
    1: (1, 1024, 0, 1024),
    2: (1, 0, 0, 1024),
    3: (1, 2048, 0, 3072),
    4: (1, 0, 1024, 3072),
    5: (1, 0, 0, 2048),
}


def test_only_the_device_that_is_measured_counts(sim):
    before = torch.ones(100, device="sim")
    with LineProfiler(work, device="sim") as profiler:
        work()
    assert lines_of(profiler, work) == EXPECTED
    assert all(r.peak_exact for r in profiler.records)
    assert {str(r.device) for r in profiler.records} == {"sim:0"}
    assert {r.net_bytes for r in profiler.records} == {1024, 0, 2048, -1024}
    del before


def test_an_accelerator_is_what_is_measured_without_further_words(sim):
    assert str(LineProfiler().device) == str(LineProfiler(target_gpu=0).device) == "sim:0"
    with pytest.raises(
        ProfilerUsageError, match=r"^sim:1 is not there: this machine has 1 such dev"
    ):
        LineProfiler(target_gpu=1)


def test_a_training_step_on_the_device_adds_up_and_resets_nothing(sim):
    model = torch.nn.Linear(16, 16).to(sim.device)
    x = torch.ones(4, 16, device=sim.device)

    def step():
        loss = model(x).pow(2).sum()
        loss.backward()
        model.zero_grad()

    step()
    kept = torch.ones(10_000, device=sim.device)
    del kept
    before = sim.module.memory_stats()
    with LineProfiler(step, torch.nn.Linear.forward, device=sim.device) as profiler:
        step()
    after = sim.module.memory_stats()
    field = "allocated_bytes.all.{}".format
    records = profiler.records
    allocated = after[field("allocated")] - before[field("allocated")]
    assert sum(r.allocated_bytes for r in records) == allocated > 0
    assert sum(r.freed_bytes for r in records) == after[field("freed")] - before[field("freed")]
    assert after[field("peak")] == before[field("peak")]  # the program's own peak is as it was


def test_the_device_can_be_switched_inside_a_profiled_function(sim):
    def work():
        first = torch.ones(128, device="sim")
        profiler.device = "cpu"
        second = torch.ones(1000)
        profiler.device = "sim"
        third = torch.ones(128, device="sim")
        return first, second, third

    with LineProfiler(work, device="sim") as profiler:
        kept = work()
    first = work.__code__.co_firstlineno
    found = {(str(r.device), r.line - first): r.net_bytes for r in profiler.records}
    on_cpu, on_sim = {3: 4000, 4: 0}, {1: 512, 2: 0, 5: 512, 6: 0}
    assert found == {("cpu", line): n_bytes for line, n_bytes in on_cpu.items()} | {
        ("sim:0", line): n_bytes for line, n_bytes in on_sim.items()
    }
    tables = profiler.display().text(width=200).split("\n\n")
    titles = [table.splitlines()[0] for table in tables]
    assert [title.rpartition(", ")[2] for title in titles] == ["cpu", "sim:0"]
    assert kept is not None


N = 10_240
N_BYTES = 4 * N


def in_step(*calls: Callable[[threading.Barrier], None]) -> None:
    """Run each call on a thread of its own; they share a barrier."""
    barrier = threading.Barrier(len(calls))
    threads = [threading.Thread(target=call, args=(barrier,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_turn(barrier):
    kept = []
    for _ in range(5):
        barrier.wait()
        kept.append(torch.ones(N, device="sim"))
        barrier.wait()


def sums(profiler):
    records = profiler.records
    return sum(r.allocated_bytes for r in records), sum(r.freed_bytes for r in records)


def test_two_threads_at_the_same_lines_book_each_byte_once(sim):
    field = "allocated_bytes.all.allocated"
    before = sim.module.memory_stats()[field]
    with LineProfiler(in_turn, device="sim") as profiler:
        in_step(in_turn, in_turn)
    counted = sim.module.memory_stats()[field] - before
    assert counted == 10 * N_BYTES
    assert sums(profiler)[0] == counted


def body(x):
    y = torch.sin(x)
    return torch.exp(y) * x


def checkpointed():
    x = torch.ones(256, device="sim", requires_grad=True)
    torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False).sum().backward()
    return x.grad


def test_what_a_checkpoint_computes_again_on_the_engines_thread_is_booked_once(sim):
    checkpointed()
    field = "allocated_bytes.all.{}".format
    before = sim.module.memory_stats()
    with LineProfiler(checkpointed, body, device="sim") as profiler:
        kept = checkpointed()
    after = sim.module.memory_stats()
    told = sums(profiler)
    assert told == tuple(after[field(f)] - before[field(f)] for f in ("allocated", "freed"))
    assert kept is not None
    hits = {r.hits for r in profiler.records if r.function == "body"}
    assert hits == ({2} if sys.version_info >= (3, 12) else {1})  # tracing reaches no such thread
