"""Lines by ``sys.monitoring``, on Python 3.12 and newer."""

import sys
import threading

import pytest
import torch

from tenure.profiler import LineProfiler

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
