import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenure.testing._device._races import History, RaceDetector, RaceError, Span, merge_clocks

pytestmark = pytest.mark.simdevice

HOME, SIDE = 0, 1


class Program:
    """Two streams over one block of 100 bytes, driven launch by launch."""

    def __init__(self):
        self.detector = RaceDetector()
        self.block = History(HOME)
        self.clocks = {HOME: {}, SIDE: {}}

    def read(self, stream, low=0, high=100):
        span = Span(self.block, low, high)
        self.detector.launch("work", stream, self.clocks[stream], [span], [])

    def write(self, stream, low=0, high=100):
        span = Span(self.block, low, high)
        self.detector.launch("work", stream, self.clocks[stream], [], [span])

    def wait(self, stream, other):
        merge_clocks(self.clocks[stream], self.clocks[other])

    def free(self):
        self.detector.free(self.block, "the block", self.clocks[HOME])
        return self.detector.faults


def test_reading_what_another_stream_writes_is_caught():
    program = Program()
    program.write(SIDE)
    match = "RAW: stream 0 reads bytes 0 to 100 of a tensor that stream 1 writes, and no wait"
    with pytest.raises(RaceError, match=match):
        program.read(HOME)


def test_writing_what_another_stream_reads_is_caught():
    program = Program()
    program.read(HOME)
    with pytest.raises(RaceError, match=r"WAR: stream 1 writes bytes 0 to 100 .* stream 0 reads"):
        program.write(SIDE)


def test_writing_what_another_stream_writes_is_caught():
    program = Program()
    program.write(HOME)
    with pytest.raises(RaceError, match=r"WAW: stream 1 writes bytes 0 to 100 .* stream 0 writes"):
        program.write(SIDE)


def test_a_fault_is_kept_as_well_as_raised():
    program = Program()
    program.write(HOME)
    with pytest.raises(RaceError, match="WAW"):
        program.write(SIDE)
    assert len(program.detector.faults) == 1


def test_a_wait_orders_all_three_kinds():
    program = Program()
    program.write(SIDE)
    program.wait(HOME, SIDE)
    program.read(HOME)
    program.wait(SIDE, HOME)
    program.write(SIDE)
    program.wait(HOME, SIDE)
    program.write(HOME)
    assert program.free() == []


def test_a_wait_before_the_work_orders_nothing():
    program = Program()
    program.wait(HOME, SIDE)
    program.write(SIDE)
    with pytest.raises(RaceError, match="RAW"):
        program.read(HOME)


def test_two_reads_need_no_order():
    program = Program()
    program.read(HOME)
    program.read(SIDE)
    program.wait(HOME, SIDE)
    assert program.free() == []


def test_neighbouring_bytes_need_no_order():
    program = Program()
    program.write(HOME, 0, 50)
    program.write(SIDE, 50, 100)


def test_one_shared_byte_is_enough():
    program = Program()
    program.write(HOME, 0, 51)
    with pytest.raises(RaceError, match="bytes 50 to 51"):
        program.write(SIDE, 50, 100)


def test_an_older_read_is_remembered_behind_a_newer_one_of_other_bytes():
    program = Program()
    program.read(HOME, 0, 10)
    program.read(HOME, 90, 100)
    with pytest.raises(RaceError, match="bytes 0 to 10"):
        program.write(SIDE, 0, 20)


def test_a_read_is_remembered_behind_one_of_another_stream():
    program = Program()
    program.read(HOME)
    program.read(SIDE)
    with pytest.raises(RaceError, match=r"WAR: stream 1 writes bytes 0 to 100 .* stream 0 reads"):
        program.write(SIDE)


def test_freeing_while_another_stream_works_is_caught():
    program = Program()
    program.read(SIDE)
    [fault] = program.free()
    assert fault.startswith(
        "freed while in use: the block of stream 0 was freed while stream 1 may still use it"
        " (work). Call record_stream(), or make the home stream wait"
    )


def test_freeing_after_a_wait_or_with_a_recorded_stream_is_clean():
    waited, recorded = Program(), Program()
    waited.read(SIDE)
    waited.wait(HOME, SIDE)
    recorded.read(SIDE)
    recorded.block.recorded_stream_ids.add(SIDE)
    assert waited.free() == recorded.free() == []


def test_a_detector_that_is_off_finds_nothing():
    program = Program()
    program.detector.enabled = False
    program.write(HOME)
    program.write(SIDE)
    assert program.free() == []


def test_an_older_write_is_remembered_behind_a_newer_one_of_other_bytes():
    program = Program()
    program.write(HOME, 0, 10)
    program.write(HOME, 90, 100)
    with pytest.raises(RaceError, match="bytes 0 to 10"):
        program.read(SIDE, 0, 20)


actions = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "wait"]),
        st.integers(0, 2),
        st.integers(0, 60),
        st.integers(1, 10),
    ),
    max_size=25,
)


@given(actions=actions)
def test_forgetting_covered_accesses_loses_no_race(actions):
    detector, block, every = RaceDetector(), History(HOME), []
    clocks = {stream: {} for stream in range(3)}
    for kind, stream, low, length in actions:
        if kind == "wait":
            merge_clocks(clocks[stream], clocks[low % 3])
            continue
        is_write = kind == "write"
        expected = any(conflicts(old, stream, low, low + length, is_write, clocks) for old in every)
        span = Span(block, low, low + length)
        spans = ([], [span]) if is_write else ([span], [])
        if expected:
            with pytest.raises(RaceError, match="no wait orders the two"):
                detector.launch("work", stream, clocks[stream], *spans)
            return
        detector.launch("work", stream, clocks[stream], *spans)
        every.append((stream, clocks[stream][stream], low, low + length, is_write))


def conflicts(old, stream, low, high, is_write, clocks):
    old_stream, tick, old_low, old_high, was_write = old
    overlap = low < old_high and old_low < high
    ordered = old_stream == stream or clocks[stream].get(old_stream, 0) >= tick
    return overlap and (is_write or was_write) and not ordered


def test_a_race_names_both_operators(sim):
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    match = r"orders the two \(aten::exp_? after aten::fill_\)\. Make the later stream wait"
    with sim.module.stream(side), pytest.raises(RaceError, match=match):
        x.exp()
    assert len(sim.take_faults()) == 1
