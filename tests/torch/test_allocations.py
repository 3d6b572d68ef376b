import torch
from torch.autograd import profiler_legacy

from tenure._torch import allocations


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
