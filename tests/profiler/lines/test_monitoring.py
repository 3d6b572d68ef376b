"""Lines by ``sys.monitoring``, on Python 3.12 and newer."""

import sys
import threading

import pytest
import torch

from tenure.profiler import LineProfiler, ProfilerUsageError

has_monitoring = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12"
)


def work():
    return torch.ones(10)


@has_monitoring
def test_a_number_that_someone_took_is_left_to_them():
    sys.monitoring.use_tool_id(3, "theirs")
    try:
        with LineProfiler(work, device="cpu") as profiler:
            assert sys.monitoring.get_tool(4) == "tenure.profiler"
            work()
        assert profiler.records[0].hits == 1
        assert (sys.monitoring.get_tool(3), sys.monitoring.get_tool(4)) == ("theirs", None)
    finally:
        sys.monitoring.free_tool_id(3)


@has_monitoring
def test_without_a_free_number_it_is_refused_and_nothing_is_changed():
    taken = [number for number in range(6) if sys.monitoring.get_tool(number) is None]
    for number in taken:
        sys.monitoring.use_tool_id(number, "theirs")
    profiler = LineProfiler(work, device="cpu")
    try:
        with pytest.raises(ProfilerUsageError, match="have taken every number of"):
            profiler.enable()
        assert not profiler.enabled
    finally:
        for number in taken:
            sys.monitoring.free_tool_id(number)
    with profiler:
        work()
    assert profiler.records[0].hits == 1


@has_monitoring
def test_nothing_is_left_of_it():
    with LineProfiler(work, device="cpu"):
        assert sys.monitoring.get_tool(3) == "tenure.profiler"
        work()
    assert sys.monitoring.get_tool(3) is None
    assert sys.gettrace() is None


@has_monitoring
def test_threads_that_run_already_are_seen():
    go, done = threading.Event(), threading.Event()

    def late():
        go.wait(10)
        work()
        done.set()

    thread = threading.Thread(target=late)
    thread.start()
    profiler = LineProfiler(work, device="cpu")
    with profiler:
        go.set()
        done.wait(10)
    thread.join()
    assert [(r.hits, r.allocated_bytes) for r in profiler.records] == [(1, 40)]


@has_monitoring
def test_a_thread_may_enable_a_profiler_that_is_on_as_the_first_thing_it_does():
    """Its state is made while all calls are reported, its own making among them."""
    profiler, failures = LineProfiler(work, device="cpu"), []

    def collect():
        try:
            with profiler:
                work()
        except BaseException as error:
            failures.append(error)

    with profiler:
        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
    assert failures == []
    assert profiler.records[0].hits == 1
