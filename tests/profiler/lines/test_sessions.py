"""Enabling and disabling profilers leaves torch as it was, whatever fails meanwhile."""

import sys
import threading

import pytest
import torch
from torch.autograd import profiler as torch_profiler

from tenure._stream import _process
from tenure._torch import cpu_allocator as allocator
from tenure.profiler import LineProfiler, Timeline
from tenure.profiler._lines import _book, _engine, _line_profiler


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
