"""Counters of a device are the process's: threads that share them book no byte twice."""

import sys
import threading
from collections.abc import Callable

import torch

from tenure.profiler import LineProfiler

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


def work(barrier):
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
    with LineProfiler(work, device="sim") as profiler:
        in_step(work, work)
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
