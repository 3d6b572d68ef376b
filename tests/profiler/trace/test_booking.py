"""One thread's way through watched lines: every interval goes to exactly one line."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tenure.profiler._trace import Figures
from tenure.profiler._trace._booking import Booking
from tenure.profiler._trace._meters import Interval, Usage

CODES = [1, 2, 3]
SIZES = st.lists(st.integers(-50, 50), max_size=3)


class FakeMeter:
    """Changes are booked as they are told; the level follows them."""

    device = torch.device("cpu")

    def __init__(self):
        self.level_bytes = 0

    def start(self):
        pass

    def read(self, changes):
        level = highest = self.level_bytes
        for n_bytes in changes:
            level += n_bytes
            highest = max(highest, level)
        self.level_bytes = level
        allocated = sum(n for n in changes if n > 0)
        freed = -sum(n for n in changes if n < 0)
        return Interval(Usage(allocated, freed, highest))


class FakeMeasured:
    """Of the device of the meter above, with nothing live on it."""

    device, n_begun = FakeMeter.device, 1

    def new_meter(self, device):
        return FakeMeter()

    def base_bytes(self, device):
        return 0


class Program(RuleBasedStateMachine):
    """Frames that come, go and are torn down, in an order that a thread can have."""

    def __init__(self):
        super().__init__()
        self.booking = Booking(FakeMeasured())
        self.frames = []
        self.n_frames = self.n_lines = self.allocated = self.freed = self.level = self.peak = 0

    def _happens(self, changes):
        if self.booking.is_active:
            self.allocated += sum(n for n in changes if n > 0)
            self.freed -= sum(n for n in changes if n < 0)
            self.peak = max(self.peak, self.level)
            for n_bytes in changes:
                self.level += n_bytes
                self.peak = max(self.peak, self.level)
            self.booking.account(changes)
        else:
            self.booking.account([])

    @rule(changes=SIZES, code=st.sampled_from(CODES))
    def enter(self, changes, code):
        self._happens(changes)
        self.n_frames += 1
        self.frames.append((self.n_frames, code))
        self.booking.enter(self.n_frames, (code, 1))

    @precondition(lambda self: self.frames)
    @rule(changes=SIZES, line=st.integers(1, 5))
    def line(self, changes, line):
        self._happens(changes)
        identity, code = self.frames[-1]
        self.booking.line(identity, (code, line))
        self.n_lines += 1

    @precondition(lambda self: self.frames)
    @rule(changes=SIZES, torn_down=st.booleans())
    def leave(self, changes, torn_down):
        self._happens(changes)
        identity, _ = self.frames.pop()
        self.booking.leave(identity, torn_down)

    @precondition(lambda self: len(self.frames) > 1)
    @rule(changes=SIZES, line=st.integers(1, 5))
    def line_of_a_caller_after_an_end_that_nobody_told(self, changes, line):
        self._happens(changes)
        self.frames.pop()
        identity, code = self.frames[-1]
        self.booking.line(identity, (code, line))
        self.n_lines += 1

    @invariant()
    def sums_are_what_happened(self):
        figures = self.booking.book().values()
        usages = [f.usage for f in figures if f.usage is not None]
        assert sum(u.allocated_bytes for u in usages) == self.allocated
        assert sum(u.freed_bytes for u in usages) == self.freed
        assert sum(f.hits for f in figures) == self.n_lines
        reached = [u.peak_bytes for u in usages]
        assert max(reached, default=0) <= max(self.peak, 0)


TestProgram = Program.TestCase


def test_a_caller_was_at_the_peak_of_what_it_called():
    booking = Booking(FakeMeasured())
    caller, callee = (CODES[0], 1), (CODES[1], 1)
    booking.enter(1, caller)
    booking.line(1, caller)
    booking.account([10])
    booking.enter(2, callee)
    booking.line(2, callee)
    booking.account([100, -100])
    booking.leave(2, torn_down=True)
    booking.account([-5])
    booking.leave(1, torn_down=False)
    by_code = {key[0]: figures for key, figures in booking.book().items()}
    assert by_code[CODES[0]] == Figures(1, Usage(10, 0, 110))
    assert by_code[CODES[1]] == Figures(1, Usage(100, 105, 110))
    assert not booking.is_active


def test_figures_of_threads_are_added_and_bounds_stay_bounds():
    first = Figures(1, Usage(10, 5, 7), {"a": 1})
    first.merge(Figures(2, Usage(20, 6, 9, exact=False, peak_exact=False), {"a": 3, "b": 2}))
    first.merge(Figures(1))
    both = Usage(30, 11, 9, exact=False, peak_exact=False)
    assert first == Figures(4, both, {"a": 3, "b": 2})
