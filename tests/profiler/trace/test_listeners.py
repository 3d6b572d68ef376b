"""Who listens is told of lines and of allocations, in order, whether lines are profiled or not."""

import torch

from tenure.profiler import LineProfiler
from tenure.profiler._trace import the_trace


class Moment:
    """The time between two looks of a recorder."""

    def __init__(self, story, line):
        self.story, self.line = story, line

    def take(self, changes, level_bytes, is_known):
        if changes:
            self.story.append((self.line, changes))

    def miss(self, was_bytes, level_bytes):
        self.story.append((self.line, None))


class Recorder:
    """Writes down, for each line of a function, the allocator's events; it is its only part too."""

    can_wait, is_outdated = True, False

    def __init__(self, function):
        self.codes = {id(function.__code__): function.__code__}
        self.first = function.__code__.co_firstlineno
        self.story, self.calls, self.at = [], [], None

    # --- on all threads

    def begin(self):
        self.calls.append("begin")

    def on_thread(self, unread):
        return self

    # --- on its one thread

    @property
    def is_active(self):
        return self.at is not None

    def forget_if_reopened(self):
        pass

    def start(self):
        self.calls.append("start")

    def claim(self):
        return None if self.at is None else Moment(self.story, self.at)

    def account(self, changes):
        assert self.at is None  # no session is open before the first line, nor after the last

    def enter(self, identity, key):
        self.at = 0

    def line(self, identity, key):
        self.at = key[1] - self.first

    def leave(self, identity, torn_down):
        self.at = None


def work():
    x = torch.ones(100)
    y = x.clone()
    del x
    return [y, *[torch.ones(10) for _ in range(2)]]


def test_a_listener_that_profiles_no_lines_is_told_the_events_of_each_in_order():
    recorder = Recorder(work)
    the_trace.open(recorder)
    try:
        work()
    finally:
        the_trace.close(recorder)
    assert recorder.calls == ["begin", "start"]
    assert recorder.story == [(1, [400]), (2, [400]), (3, [-400]), (4, [40, 40])]
    assert not torch._C._autograd._profiler_enabled()


def test_a_listener_and_a_profiler_are_told_the_same_beside_each_other():
    recorder, profiler = Recorder(work), LineProfiler(work, device="cpu")
    with profiler:
        the_trace.open(recorder)
        try:
            work()
        finally:
            the_trace.close(recorder)
        work()
    told = {line: sum(n for n in sizes if n > 0) for line, sizes in recorder.story}
    booked = {r.line - recorder.first: r.allocated_bytes for r in profiler.records}
    assert booked == {line: 2 * n_bytes for line, n_bytes in told.items()}
