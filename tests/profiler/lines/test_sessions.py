"""Enabling and disabling profilers leaves torch as it was, whatever fails meanwhile."""

import sys
import threading
from collections import deque

import pytest
import torch
from torch.autograd import profiler as torch_profiler
from torch.autograd import profiler_legacy

from tenure._stream import _process
from tenure._torch import allocations
from tenure._torch import cpu_allocator as allocator
from tenure.profiler import LineProfiler, Timeline
from tenure.profiler._lines import _book, _engine, _line_profiler

from .test_other_profilers import NUMBER, facts
from .truth import sums_of


def work():
    return torch.ones(10)


def fail(*_):
    raise MemoryError("no memory")


def state():
    table = allocator._table()
    return torch_profiler._prepare_profiler, table.flag.value, torch_profiler._enable_profiler


SOURCE = _line_profiler.LineEngine


@pytest.mark.parametrize(
    "place",
    [(_process, "enter_host_blocks"), (_process, "announce"), (SOURCE, "start")],
    ids=lambda place: place[1],
)
def test_a_first_profiler_that_can_not_begin_changes_nothing(place, monkeypatch):
    profiler, before = LineProfiler(work, device="cpu"), state()
    with monkeypatch.context() as patched:
        patched.setattr(*place, fail)
        with pytest.raises(MemoryError, match="no memory"):
            profiler.enable()
    assert not profiler.enabled
    assert state() == before
    with profiler:
        work()
    assert profiler.records[0].hits == 1
    assert state() == before


def test_a_profiler_whose_last_figures_can_not_be_read_is_off_all_the_same(monkeypatch):
    profiler, before = LineProfiler(work, device="cpu"), state()
    traced = sys.gettrace(), threading.gettrace()
    profiler.enable()
    work()
    with monkeypatch.context() as patched:
        patched.setattr(_engine.WatchedThread, "mark", fail)
        with pytest.raises(MemoryError, match="no memory"):
            profiler.disable()
    assert not profiler.enabled
    assert (state(), sys.gettrace(), threading.gettrace()) == (before, *traced)
    with profiler:
        work()
    assert profiler.records[0].hits == 2


def test_a_second_profiler_that_can_not_begin_leaves_the_first_on(monkeypatch):
    first, second, before = LineProfiler(work, device="cpu"), LineProfiler(work), state()
    with first:
        with monkeypatch.context() as patched:
            patched.setattr(_book.Book, "begin", fail)
            with pytest.raises(MemoryError, match="no memory"):
                second.enable()
        assert (first.enabled, second.enabled) == (True, False)
        work()
    assert first.records[0].allocated_bytes == 40
    assert state() == before


@pytest.mark.parametrize("name", ["enter_host_blocks", "announce"])
def test_a_timeline_that_can_not_begin_changes_nothing(name, monkeypatch):
    before = state()
    with monkeypatch.context() as patched:
        patched.setattr(_process, name, fail)
        with pytest.raises(MemoryError, match="no memory"), Timeline():
            pass
    assert state() == before
    with Timeline() as timeline:
        work()
    assert timeline.report.notes == ()
    assert state() == before


# --- how long they are, and the table of the allocator


def test_a_line_that_runs_for_long_never_fills_a_session(monkeypatch):
    lengths, turn = [], allocations.turn

    def counting():
        changes = turn()
        lengths.append(len(changes.cpu))
        return changes

    monkeypatch.setattr(allocations, "turn", counting)
    x = torch.ones(1)

    def one():
        torch.neg(x)

    def calls():
        one()
        return [one() for _ in range(5000)]

    def work():
        calls()

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work()
    assert sums_of(profiler) == (4 * 5001, 4 * 5001, 4)
    assert max(lengths) < 1100


def bytes_kept_after(n_calls):
    """Run a function that calls others and then profiles itself; return what its lines kept."""

    def nothing(_):
        pass

    def work():
        x = torch.ones(100)
        # one line, because the marks of more would have the stream read before
        deque(map(nothing, range(n_calls)))
        with profiler_legacy.profile():
            y = torch.ones(200)
            z = y * 2
        return x + z.sum()

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work()
    return sum(each.net_bytes for each in profiler.records)


def test_one_that_begins_after_any_number_of_calls_has_no_byte_counted_twice():
    # the stream is read after so many calls, also of what tells that a session has ended
    kept = {n_calls: bytes_kept_after(n_calls) for n_calls in range(_engine.TICKS_PER_TURN)}
    assert set(kept.values()) == {400}, kept


def test_where_the_allocators_table_is_out_of_reach_peaks_are_lower_bounds(monkeypatch):
    nothing = allocator._NullTable()
    monkeypatch.setattr(allocator, "_table", lambda: nothing)

    def work():
        x = torch.ones(100)
        return x * 2

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work()
    assert facts(profiler) == [
        (1, 400, 0, 400, True, False),
        (1, 400 + NUMBER, 400 + NUMBER, 800 + NUMBER, True, False),
    ]
