"""Counters of a device are the process's: threads that share them book no byte twice."""

import re
import sys
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenure.profiler import LineProfiler
from tenure.profiler._lines import _device_meter
from tenure.profiler._lines._device_meter import DeviceAccount, DeviceMeter

from .test_meters import FakeAllocator

DEVICE = torch.device("cuda:0")
FOOTNOTE = (
    "~ other threads used sim:0 while the line ran. Its counters are the process's: some of their "
    "bytes may stand here, or some of these on their lines."
)
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


# --- on the simulated device, which tells no thread its own events


def test_two_threads_at_the_same_lines_book_each_byte_once_and_say_what_they_cannot_tell(sim):
    field = "allocated_bytes.all.allocated"
    before = sim.module.memory_stats()[field]
    with LineProfiler(work, device="sim") as profiler:
        in_step(work, work)
    counted = sim.module.memory_stats()[field] - before
    assert counted == 10 * N_BYTES
    assert sums(profiler)[0] == counted
    shared = [record for record in profiler.records if record.shared]
    assert shared
    assert not any(record.exact for record in shared)


def test_what_the_sign_before_a_shared_number_means_stands_below_the_table(sim):
    with LineProfiler(work, device="sim") as profiler:
        in_step(work, work)
    assert any(record["shared"] for record in profiler.to_dict()["records"])
    text = profiler.display().text(width=300)
    assert text.splitlines()[-1] == FOOTNOTE
    # which of their two lines has how many of the 400 KiB, the threads' turns decide
    assert re.search(r"~ +\d+\.0 KiB", text)
    assert FOOTNOTE.replace("'", "&#x27;") in " ".join(profiler._repr_html_().split())


def test_threads_one_after_the_other_are_told_apart(sim):
    with LineProfiler(work, device="sim") as profiler:
        in_step(work)
        in_step(work)
        work(threading.Barrier(1))
    assert all(record.exact and not record.shared for record in profiler.records)
    assert sums(profiler)[0] == 15 * N_BYTES
    assert FOOTNOTE not in str(profiler)


def test_what_a_thread_does_before_it_comes_to_a_line_is_booked_nowhere(sim):
    def outside(barrier):
        kept = torch.ones(N, device="sim")
        barrier.wait()
        del kept

    with LineProfiler(work, device="sim") as profiler:
        outside(threading.Barrier(1))
        in_step(work)
        outside(threading.Barrier(1))
        work(threading.Barrier(1))
    assert all(record.exact for record in profiler.records)
    assert sums(profiler)[0] == 10 * N_BYTES


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


def test_host_memory_of_the_engines_thread_is_booked_on_the_line_that_called_it(sim):
    checkpointed()
    with LineProfiler(checkpointed, device="cpu") as alone:
        checkpointed()
    with LineProfiler(checkpointed, body, device="cpu") as both:
        checkpointed()
    assert sums(both)[0] == sums(alone)[0] > 0


# --- where each thread is told its own events, as on CUDA


class Program:
    """Two threads on one device: what each does is an event of its own, and counts for both."""

    def __init__(self):
        self.allocator = FakeAllocator()
        self._patch = mock.patch.object(
            _device_meter, "counters_of", lambda device: self.allocator.memory_stats(device)
        )
        self._patch.start()
        account = DeviceAccount(DEVICE)
        self.meters = [DeviceMeter(account), DeviceMeter(account)]
        self.events = [[], []]
        self.booked = [[0, 0], [0, 0]]

    def __enter__(self):
        for meter in self.meters:
            meter.use(True)
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def change(self, thread, n_bytes):
        self.allocator.change(n_bytes)
        self.events[thread].append(n_bytes)

    def look(self, thread, *, is_told=True):
        own, self.events[thread] = self.events[thread], []
        usage = self.meters[thread].read(own if is_told else None)
        self.booked[thread][0] += usage.allocated_bytes
        self.booked[thread][1] += usage.freed_bytes
        return usage


@pytest.fixture
def program():
    with Program() as found:
        yield found


def test_a_thread_books_its_own_events_and_leaves_the_others(program):
    program.change(0, 100)
    program.change(1, 30)
    program.change(1, -10)
    first = program.look(0)
    assert (first.allocated_bytes, first.freed_bytes) == (100, 0)
    assert (first.exact, first.shared) == (False, True)
    second = program.look(1)
    assert (second.allocated_bytes, second.freed_bytes) == (30, 10)
    assert (second.exact, second.shared) == (True, False)  # they say all that was left


def test_events_that_are_all_that_was_counted_are_exact_beside_other_threads(program):
    program.change(0, 100)
    assert program.look(0).exact
    assert program.look(1).exact
    assert program.booked == [[100, 0], [0, 0]]


def test_a_thread_that_was_told_nothing_takes_what_is_left(program):
    program.change(0, 100)
    program.change(1, 30)
    program.look(0)
    usage = program.look(1, is_told=False)
    assert (usage.allocated_bytes, usage.exact, usage.shared) == (30, False, True)


def test_what_another_thread_took_first_is_not_booked_again(program):
    program.change(0, 100)
    program.change(1, 30)
    assert program.look(1, is_told=False).allocated_bytes == 130
    usage = program.look(0)
    assert (usage.allocated_bytes, usage.exact, usage.shared) == (0, False, True)


def test_what_an_unprofiled_thread_did_is_booked_on_no_line_and_does_not_stay(program):
    program.meters[1].use(False)
    program.change(0, 100)
    program.allocator.change(1000)  # nobody's
    usage = program.look(0)
    assert (usage.allocated_bytes, usage.exact, usage.shared) == (100, False, True)
    program.change(0, 7)
    usage = program.look(0)
    assert (usage.allocated_bytes, usage.exact) == (7, True)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.integers(0, 1), st.integers(1, 50), st.booleans()),
        st.tuples(st.just("look"), st.integers(0, 1), st.booleans()),
    ),
    max_size=30,
)


@given(STEPS)
def test_no_order_of_looks_books_a_byte_twice_and_events_lose_none(steps):
    with Program() as program:
        is_always_told = True
        for kind, thread, *rest in steps:
            if kind == "change":
                n_bytes, is_freed = rest
                program.change(thread, n_bytes)
                if is_freed:
                    program.change(thread, -n_bytes)
            else:
                is_always_told &= rest[0]
                program.look(thread, is_told=rest[0])
        for thread in (0, 1):
            program.look(thread)
    figures = program.allocator.figures
    counted = [figures["allocated"], figures["freed"]]
    sums = [sum(numbers) for numbers in zip(*program.booked, strict=True)]
    assert sums[0] <= counted[0]
    assert sums[1] <= counted[1]
    if is_always_told:
        assert sums == counted
