"""Reading the variables of running frames leaves the frames as they were, and counts references.

The interpreter writes a snapshot back when a trace function returns, so that is where it is read.

By private names, because no report says which variables were read, or which are only lent.
"""

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


def look(n):
    if n < 0:
        absent = n

    def grow():
        nonlocal n
        n += 1
        return lambda: absent

    grow()
    n += 1
    return n


def count():
    n = 0
    while True:
        n += 1
        yield n


def test_variables_outlive_a_report_from_inside_a_trace_function():
    with stopping_in(step, lambda _: snapshot()):
        assert step().tolist() == [3, 3, 3]


def test_captured_and_unset_variables_outlive_a_reading():
    with stopping_in(look, read_locals):
        assert look(1) == 3


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


def test_nothing_of_a_frame_is_kept_by_reading_it():
    here = sys._getframe()
    kept = torch.ones(3)
    n_references = sys.getrefcount(kept)
    read_locals(here)
    assert sys.getrefcount(kept) == n_references


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
def test_arguments_that_wait_for_a_call_are_in_flight():
    def look(given):
        return _lent.values_in_flight(sys._getframe(1))

    def caller():
        return [made := object(), look(object())], id(made)

    (made, found), _ = caller()
    assert found == [id(made)]


@lends
def test_a_frame_of_another_layout_is_refused(monkeypatch):
    monkeypatch.setattr(_lent, "_is_as_expected", lambda: False)
    with pytest.raises(TenureError, match=r"Python 3\.\d+.* keeps the variables .* update tenure"):
        holders(torch.ones(1))


# --- what counts as the one reference that was measured


class Entry:
    def __init__(self):
        self.found = object()

    def count(self):
        found = self.found
        return sys.getrefcount(found)


def of_an_item():
    items = [object()]
    found = items[0]
    return sys.getrefcount(found)


def of_an_attribute():
    return Entry().count()


def in_a_comprehension():
    items = [object()]
    return next(iter({sys.getrefcount(found) for found in items}))


def in_a_loop():
    items = [object()]
    for found in items:
        count = sys.getrefcount(found)
    return count


@pytest.mark.parametrize("count", [of_an_item, of_an_attribute, in_a_comprehension, in_a_loop])
def test_what_a_container_holds_counts_one_more_than_what_a_variable_alone_holds(count):
    assert count() == SOLE + 1


def test_what_was_popped_counts_as_what_a_variable_alone_holds():
    items = [object()]
    found = items.pop()
    assert sys.getrefcount(found) == SOLE
