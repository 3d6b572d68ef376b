"""A small ring pager: clean as written, and caught without any one of its waits."""

import math

import pytest
import torch

from tenure.testing import RaceError, Rates

N_UNITS, N_SLOTS, UNIT_ELEMENTS = 6, 2, 1 << 14
WAITS_BETWEEN_STREAMS = ("slot is filled", "slot is free", "result is computed", "result is taken")


class RingProgram:
    """Streams units through two device slots, doubles each, and takes the results home."""

    def __init__(self, sim, without=None):
        self.without = without
        self.compute = sim.module.current_stream()
        self.page_in, self.page_out = sim.module.Stream(), sim.module.Stream()
        self.stream = sim.module.stream
        self.units = [torch.full((UNIT_ELEMENTS,), float(i)).pin_memory() for i in range(N_UNITS)]
        self.results = [torch.zeros(UNIT_ELEMENTS).pin_memory() for _ in range(N_UNITS)]
        self.slots = [torch.empty(UNIT_ELEMENTS, device=sim.device) for _ in range(N_SLOTS)]
        self.slot_free = [sim.module.Event() for _ in range(N_SLOTS)]
        self.result = torch.empty(UNIT_ELEMENTS, device=sim.device)
        self.taken = sim.module.Event()

    def wait(self, name, stream, event):
        if name != self.without:
            stream.wait_event(event)

    def fill(self, number):
        slot = number % N_SLOTS
        self.wait("slot is free", self.page_in, self.slot_free[slot])
        with self.stream(self.page_in):
            self.slots[slot].copy_(self.units[number], non_blocking=True)
        self.wait("slot is filled", self.compute, self.page_in.record_event())

    def double(self, number):
        slot = number % N_SLOTS
        self.wait("result is taken", self.compute, self.taken)
        torch.mul(self.slots[slot], 2, out=self.result)
        self.slot_free[slot].record(self.compute)

    def take(self, number):
        self.wait("result is computed", self.page_out, self.compute.record_event())
        with self.stream(self.page_out):
            self.results[number].copy_(self.result, non_blocking=True)
            self.taken.record()

    def run(self):
        for number in range(N_UNITS):
            self.fill(number)
            self.double(number)
            self.take(number)
        if self.without != "host may read":
            self.taken.synchronize()
        return [result[0].item() for result in self.results]


def test_the_program_as_written_is_clean(sim):
    assert RingProgram(sim).run() == [2.0 * number for number in range(N_UNITS)]
    sim.module.synchronize()
    assert sim.faults == []


@pytest.mark.parametrize("name", WAITS_BETWEEN_STREAMS)
def test_without_one_wait_between_streams_a_race_is_caught(sim, name):
    program = RingProgram(sim, without=name)
    with pytest.raises(RaceError, match="no wait orders the two"):
        program.run()
    sim.module.synchronize()
    assert sim.take_faults() != []


def test_without_the_wait_of_the_host_it_reads_poison(sim):
    program = RingProgram(sim, without="host may read")
    assert any(math.isnan(value) for value in program.run())
    sim.module.synchronize()


def test_the_share_of_the_limit_is_a_number_that_repeats(sim):
    def share():
        sim(rates=Rates(h2d_bytes_per_s=1e8, d2h_bytes_per_s=2e8))
        RingProgram(sim).run()
        return sim.busy_s("h2d") / sim.elapsed_s

    first = share()
    assert first == share()
    assert 0.90 < first < 1.0
