"""The engine of Python 3.12 and newer."""

import sys
import threading

import pytest
import torch

from tenure.profiler import LineProfiler, _monitoring

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12"
)


def work():
    return torch.ones(10)


def test_nothing_is_left_of_it():
    monitoring = sys.monitoring
    with LineProfiler(work, device="cpu"):
        assert monitoring.get_tool(monitoring.PROFILER_ID) == "tenure.profiler"
        work()
    assert monitoring.get_tool(monitoring.PROFILER_ID) is None
    assert sys.gettrace() is None


def test_a_number_that_someone_has_is_left_to_them():
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.PROFILER_ID, "theirs")
    try:
        assert _monitoring.free_tool() == 3
    finally:
        monitoring.free_tool_id(monitoring.PROFILER_ID)
    assert _monitoring.free_tool() == monitoring.PROFILER_ID


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
