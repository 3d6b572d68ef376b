"""Events and counters of allocations, past what torch promises."""

import pytest
import torch
from torch.autograd import profiler_legacy

from tenure._torch import allocations, cpu_allocator


def test_a_session_notes_allocations_and_no_operations():
    allocations.begin()
    x = torch.ones(8)
    made = allocations.turn()
    x.add_(x)
    assert (made.cpu, allocations.turn().cpu) == ([32], [])
    del x
    assert allocations.end() == ([-32], [])
    assert not allocations.is_profiling()


def test_record_function_works_again_after_a_session():
    allocations.begin()
    allocations.end()
    with profiler_legacy.profile() as seen, torch.autograd.profiler.record_function("mine"):
        torch.ones(1)
    assert "mine" in {event.name for event in seen.function_events}


def test_a_session_that_someone_else_ended_gives_nothing():
    allocations.begin()
    torch._C._autograd._disable_profiler_legacy()
    assert allocations.turn() is None
    allocations.begin()
    torch._C._autograd._disable_profiler_legacy()
    assert allocations.end() is None


def test_events_of_several_threads_are_put_in_the_order_of_time():
    class Event:
        def __init__(self, at_us, n_bytes):
            self.start_us = lambda: at_us
            self.cpu_memory_usage = lambda: 0
            self.cuda_memory_usage = lambda: n_bytes

    lists = [[Event(1, 10), Event(4, -10)], [Event(2, 20), Event(3, -20)]]
    assert allocations._changes(lists).cuda == [10, 20, -20, -10]


def test_where_the_table_of_sizes_cannot_be_reached_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(cpu_allocator, "_REPORTER", "no_such_symbol")
    cpu_allocator._table.cache_clear()
    try:
        assert not cpu_allocator.is_known()
        cpu_allocator.keep_sizes()
        cpu_allocator.enter(torch.ones(1).untyped_storage())
        assert cpu_allocator.live_bytes() == 0
    finally:
        cpu_allocator._table.cache_clear()


def test_the_counter_of_live_bytes_is_refused_where_none_behaves_like_it(monkeypatch):
    monkeypatch.setattr(cpu_allocator, "_counts", lambda word, n_bytes: False)
    with pytest.raises(LookupError, match=r"^0 counters of c10 look like that of live bytes$"):
        cpu_allocator._C10Table()


@pytest.mark.parametrize("way", ["reported", "named"])
def test_a_mark_is_no_memory(way, monkeypatch):
    if way == "named":
        monkeypatch.setattr(allocations, "_report", lambda: None)
    cpu_allocator.keep_sizes()
    allocations.begin()
    before = cpu_allocator.live_bytes()
    allocations.marker()(3)
    block = torch.UntypedStorage(64, device="cpu")
    allocations.marker()(2**20)
    after = cpu_allocator.live_bytes()
    events = allocations.end().cpu
    cpu_allocator.keep_sizes_as_before()
    assert events == [allocations.as_event(3), 64, allocations.as_event(2**20)]
    assert after - before == block.nbytes()
    assert not allocations.is_profiling()
