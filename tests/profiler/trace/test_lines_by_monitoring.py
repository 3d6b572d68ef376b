"""The engine of Python 3.12 and newer; its numbers on a stand-in for ``sys.monitoring`` as well."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from tenure.profiler import LineProfiler
from tenure.profiler._trace import Watch, _lines_by_monitoring
from tenure.profiler._trace._lines_by_monitoring import best_engine
from tenure.profiler._trace._trace import Trace

has_monitoring = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12"
)


def work():
    return torch.ones(10)


class Numbers:
    """The tool numbers of ``sys.monitoring``; no event is ever reported."""

    PROFILER_ID, OPTIMIZER_ID = 2, 5

    def __init__(self):
        self.events = SimpleNamespace(**{name: i for i, name in enumerate(EVENTS)})
        self.names = {}

    def get_tool(self, number):
        return self.names.get(number)

    def use_tool_id(self, number, name):
        if number in self.names:
            raise ValueError(f"tool {number} is already in use")
        self.names[number] = name

    def free_tool_id(self, number):
        del self.names[number]

    def register_callback(self, number, event, callback):
        assert number in self.names

    def set_events(self, number, events):
        assert number in self.names

    def set_local_events(self, number, code, events):
        assert number in self.names


EVENTS = [
    "NO_EVENTS",
    "LINE",
    "PY_START",
    "PY_RESUME",
    "PY_RETURN",
    "PY_YIELD",
    "PY_THROW",
    "PY_UNWIND",
    "JUMP",
    "INSTRUCTION",
]


@pytest.fixture
def numbers(monkeypatch):
    stand_in = Numbers()
    monkeypatch.setattr(_lines_by_monitoring, "monitoring", stand_in)
    return stand_in


def opened(trace):
    """A profiler that is enabled in a trace."""
    watch = Watch(torch.device("cpu"))
    trace.open(watch)
    return watch


def test_the_number_of_the_interpreters_own_profiler_is_left_to_it(numbers):
    trace = Trace(best_engine)
    watch = opened(trace)
    assert numbers.names == {3: "tenure.profiler"}
    numbers.use_tool_id(numbers.PROFILER_ID, "cProfile")
    trace.close(watch)
    assert numbers.names == {numbers.PROFILER_ID: "cProfile"}


def test_a_number_that_someone_took_since_the_import_is_left_to_them(numbers):
    trace = Trace(best_engine)
    numbers.use_tool_id(3, "theirs")
    trace.close(opened(trace))
    watch = opened(trace)
    assert numbers.names == {3: "theirs", 4: "tenure.profiler"}
    trace.close(watch)
    assert numbers.names == {3: "theirs"}


def test_without_a_free_number_lines_come_by_tracing(numbers):
    numbers.names = dict.fromkeys(range(6), "theirs")
    before = sys.gettrace()
    trace = Trace(best_engine)
    watch = opened(trace)
    assert sys.gettrace() is not before
    trace.close(watch)
    assert sys.gettrace() is before
    assert set(numbers.names.values()) == {"theirs"}


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
