"""Reading the variables of running frames leaves the frames as they were, and counts references.

The interpreter writes a snapshot back when a trace function returns, so that is where it is read.

By private names, because no report says which variables were read, or which are only lent.
"""

import itertools
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from tenure import TenureError
from tenure._heap import _lent
from tenure._heap._reading import read_locals
from tenure._torch.counting import SOLE
from tenure.profiler import holders, snapshot

lends = pytest.mark.skipif(
    not _lent.LENDS, reason="up to Python 3.13 every parameter adds a reference"
)


@contextmanager
def stopping_in(function, act):
    """Call ``act`` with the frame at every line of a function, as a debugger does at its prompt."""
    before = sys.gettrace()

    def trace(frame, *_):
        if frame.f_code is function.__code__:
            act(frame)
            return trace
        return None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def step():
    x = torch.ones(3)
    x = x + 1
    return x + 1


def count():
    n = 0
    while True:
        n += 1
        yield n


def test_variables_outlive_a_report_from_inside_a_trace_function():
    n_stops = itertools.count()
    # where it is one, and where it is two
    with stopping_in(step, lambda _: next(n_stops) in (2, 3) and snapshot()):
        assert step().tolist() == [3, 3, 3]
    assert next(n_stops) > 3


def test_variables_of_a_generator_outlive_a_reading():
    running = count()
    with stopping_in(count, read_locals):
        assert [next(running), next(running)] == [1, 2]
    assert ("n", 2) in read_locals(running.gi_frame)
    assert next(running) == 3


def test_variables_of_a_thread_outlive_a_reading_while_its_trace_function_runs():
    stopped, go, found = threading.Event(), threading.Event(), []

    def stop(_):
        stopped.set()
        go.wait(10)

    def work():
        with stopping_in(step, stop):
            found.append(step())

    thread = threading.Thread(target=work)
    thread.start()
    stopped.wait(10)
    while frame := sys._current_frames().get(thread.ident):
        while frame is not None and frame.f_code is not step.__code__:
            frame = frame.f_back
        if frame is not None:
            read_locals(frame)
        go.set()
    thread.join()
    assert found[0].tolist() == [3, 3, 3]


def test_a_debugger_that_holds_the_variables_can_still_set_them():
    def edit(frame):
        mine = frame.f_locals
        read_locals(frame)
        if "x" in mine:
            mine["x"] = torch.zeros(3)

    with stopping_in(step, edit):
        assert step().tolist() == [1, 1, 1]


# --- parameters that add no reference to their object


@lends
def test_a_parameter_that_gets_a_variable_of_the_caller_is_lent():
    def look(lent, given, *rest, by_name, **others):
        return _lent.lent_parameters(sys._getframe())

    def captured(lent):
        return lambda: lent, _lent.lent_parameters(sys._getframe())

    def generator(lent):
        yield _lent.lent_parameters(sys._getframe())

    variable = object()
    # a call in an assert keeps its arguments in variables
    found = look(variable, object(), variable, by_name=variable, more=1)
    assert found == {"lent", "by_name"}
    assert captured(variable)[1] == frozenset()
    assert next(generator(variable)) == frozenset()


@lends
def test_a_frame_of_another_layout_is_refused(monkeypatch):
    monkeypatch.setattr(_lent, "_is_as_expected", lambda: False)
    with pytest.raises(TenureError, match=r"Python 3\.\d+.* keeps the variables .* update tenure"):
        holders(torch.ones(1))


# --- what counts as the one reference that was measured


def of_an_item():
    items = [object()]
    found = items[0]
    return sys.getrefcount(found)


def in_a_loop():
    items = [object()]
    for found in items:
        count = sys.getrefcount(found)
    return count


def popped():
    items = [object()]
    found = items.pop()
    return sys.getrefcount(found)


def test_what_a_container_holds_counts_one_more_than_what_a_variable_alone_holds():
    assert (of_an_item(), in_a_loop(), popped()) == (SOLE + 1, SOLE + 1, SOLE)
