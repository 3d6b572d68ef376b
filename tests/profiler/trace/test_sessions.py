"""Opening and closing profilers, whatever fails meanwhile."""

import pytest
import torch
from torch.autograd import profiler as torch_profiler

from tenure._torch import cpu_allocator as allocator
from tenure.profiler._trace import Watch, _sessions
from tenure.profiler._trace._trace import Trace


class Silent:
    """An engine that reports nothing, and notes what it is told."""

    def __init__(self, trace):
        self.told = []

    def start(self):
        self.told.append("start")

    def join(self):
        self.told.append("join")

    def watch(self, codes):
        self.told.append(len(codes))

    def stop(self):
        self.told.append("stop")


class Broken(Silent):
    def start(self):
        raise MemoryError("no engine")


def fail(*_):
    raise MemoryError("no memory")


def new_watch():
    watch = Watch(torch.device("cpu"))
    watch.codes = {id(fail.__code__): fail.__code__}
    return watch


@pytest.fixture
def sizes(monkeypatch):
    """What the allocator was told to keep."""
    told = []
    monkeypatch.setattr(allocator, "keep_sizes", told.append)
    monkeypatch.setattr(allocator, "keep_sizes_as_before", lambda: told.append(False))
    return told


def check_untouched(before, sizes, trace, watch):
    assert torch_profiler._prepare_profiler is before
    assert sizes[-1] is False
    assert not trace.is_open(watch)


@pytest.mark.parametrize("place", [(_sessions, "enter_host_blocks"), (Watch, "begin")])
def test_a_first_opening_that_fails_is_undone(place, sizes, monkeypatch):
    trace, watch, before = Trace(Silent), new_watch(), torch_profiler._prepare_profiler
    with monkeypatch.context() as patched:
        patched.setattr(*place, fail)
        with pytest.raises(MemoryError, match="no memory"):
            trace.open(watch)
    check_untouched(before, sizes, trace, watch)
    trace.open(watch)
    assert trace.is_open(watch)
    trace.close(watch)
    check_untouched(before, sizes, trace, watch)


def test_an_engine_that_does_not_start_leaves_nothing_open(sizes):
    trace, watch, before = Trace(Broken), new_watch(), torch_profiler._prepare_profiler
    with pytest.raises(MemoryError, match="no engine"):
        trace.open(watch)
    check_untouched(before, sizes, trace, watch)


def test_a_second_opening_that_fails_leaves_the_first_open(sizes, monkeypatch):
    trace, first, second = Trace(Silent), new_watch(), new_watch()
    trace.open(first)
    monkeypatch.setattr(second, "begin", fail)
    with pytest.raises(MemoryError, match="no memory"):
        trace.open(second)
    assert (trace.is_open(first), trace.is_open(second), sizes[-1]) == (True, False, True)
    trace.close(first)
    assert sizes[-1] is False
