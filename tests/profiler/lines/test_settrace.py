"""Beside other tracers: since Python 3.12 they keep every event, before that it is refused."""

import sys
import threading

import pytest
import torch

from tenure.profiler import LineProfiler, ProfilerUsageError

old_python = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="from Python 3.12 on nothing is traced by the profiler"
)


new_python = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="before Python 3.12 there is room for one tracer"
)


class Recorder:
    """A debugger that notes what it is told; it may put itself back in place."""

    def __init__(self, *, reinstalls=False):
        self.events = []
        self.reinstalls = reinstalls

    def __call__(self, frame, event, arg):
        # contextlib, which tenure uses, has a function called "helper" as well
        if frame.f_code.co_filename != __file__:
            return None
        self._note(frame, event)
        if self.reinstalls:
            sys.settrace(self)
        return self.local

    def local(self, frame, event, arg):
        self._note(frame, event)
        return self.local

    def _note(self, frame, event):
        self.events.append((frame.f_code.co_name, event, frame.f_lineno))


def helper(x):
    for _ in range(3):
        x = x + 1
    return x


def work():
    x = torch.ones(100)
    try:
        helper(x)
        raise ValueError
    except ValueError:
        return x


def under(recorder, call):
    sys.settrace(recorder)
    try:
        call()
    finally:
        ended = sys.gettrace()
        sys.settrace(None)
    assert ended is recorder
    return [event for event in recorder.events if event[0] in {"work", "helper"}]


@old_python
@pytest.mark.parametrize("home", [sys, threading])
def test_beside_a_debugger_it_is_refused_and_nothing_is_changed(home):
    recorder, profiler = Recorder(), LineProfiler(work, device="cpu")
    home.settrace(recorder)
    try:
        with pytest.raises(ProfilerUsageError, match=r"^LineProfiler can.t be enabled besi"):
            profiler.enable()
        assert home.gettrace() is recorder
    finally:
        home.settrace(None)
    assert not profiler.enabled
    with profiler:
        work()
    assert profiler.records[0].hits == 1


@new_python
@pytest.mark.parametrize("options", [{}, {"reinstalls": True}])
@pytest.mark.parametrize("functions", [(work,), (work, helper), (helper,)])
def test_a_debugger_gets_every_event_and_stays(functions, options):
    plain = under(Recorder(**options), work)
    profiler = LineProfiler(*functions, device="cpu")

    def profiled():
        with profiler:
            work()

    assert under(Recorder(**options), profiled) == plain
    assert sum(record.hits for record in profiler.records) > 0


@old_python
def test_a_thread_that_outlives_the_profiler_is_traced_no_more():
    go, traces = threading.Event(), []

    def late():
        go.wait(10)
        work()
        traces.append(sys.gettrace())

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        thread = threading.Thread(target=late)
        thread.start()
    go.set()
    thread.join()
    assert profiler.records == ()
    assert traces == [None]


@new_python
def test_a_number_of_sys_monitoring_that_someone_took_is_left_to_them():
    sys.monitoring.use_tool_id(3, "theirs")
    try:
        with LineProfiler(work, device="cpu") as profiler:
            assert sys.monitoring.get_tool(4) == "tenure.profiler"
            work()
        assert profiler.records[0].hits == 1
        assert (sys.monitoring.get_tool(3), sys.monitoring.get_tool(4)) == ("theirs", None)
    finally:
        sys.monitoring.free_tool_id(3)


def test_a_thread_that_ran_before_collects_for_a_profiler_that_is_on():
    ready, go = threading.Event(), threading.Event()
    profiler = LineProfiler(work, device="cpu")

    def collect():
        ready.set()
        go.wait()
        with profiler:
            work()

    thread = threading.Thread(target=collect)
    thread.start()
    ready.wait()
    with profiler:
        go.set()
        thread.join()
    assert profiler.records[0].hits == 1


def test_threads_that_share_a_profiler_count_each_line_once():
    n_threads, n_times = 4, 25
    profiler = LineProfiler(helper, device="cpu")
    barrier = threading.Barrier(n_threads)

    def collect():
        for _ in range(n_times):
            barrier.wait()  # so that all find it off, and enable it
            with profiler:
                helper(1)
                barrier.wait()

    threads = [threading.Thread(target=collect) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.hits for record in profiler.records] == [
        n * n_threads * n_times for n in (4, 3, 1)
    ]
    assert not profiler.enabled
