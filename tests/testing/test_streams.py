"""Streams, events, and backward passes, which run on the streams that are current around them."""

from contextlib import contextmanager

import pytest
import torch

from tenure.testing import RaceError, Rates
from tests.threads import on_thread


@contextmanager
def races(sim, match):
    """One race is found in the block."""
    with pytest.raises(RaceError, match=match):
        yield
    assert len(sim.take_faults()) == 1
    sim.module.synchronize()


@pytest.fixture
def side(sim):
    made = sim.module.Stream()
    made.wait_stream(sim.module.current_stream())
    return made


def test_streams_have_the_interface_of_torch_cuda(sim):
    module = torch.get_device_module(sim.device)
    side = module.Stream()
    assert isinstance(side, torch.Stream)
    assert side.device == sim.device
    assert module.current_stream() is module.default_stream()
    with module.stream(side):
        assert module.current_stream() is side
        with module.stream(None):
            assert module.current_stream() is side
    assert torch.accelerator.current_stream() is module.default_stream()
    torch.accelerator.set_stream(side)
    assert module.current_stream() is side
    torch.accelerator.set_stream(module.default_stream())
    assert repr(side).startswith(f"<sim.Stream {side.stream_id}, ready_s=")
    torch.zeros(1000, device=sim.device)
    before = sim.host_waits
    torch.accelerator.synchronize()
    assert sim.host_waits == before + 1
    assert side.query()


def test_another_thread_works_on_the_default_stream_until_it_chooses(sim):
    module = sim.module
    side, other = module.Stream(), module.Stream()

    def work():
        before = module.current_stream()
        with module.stream(other):
            return before, module.current_stream()

    with module.stream(side):
        assert on_thread(work) == (module.default_stream(), other)
        assert module.current_stream() is side


def test_a_wait_moves_the_waiting_stream_on_the_virtual_clock(sim, side):
    x = torch.zeros(1 << 16, device=sim.device)
    side.wait_stream(sim.module.current_stream())
    assert side.ready_s == sim.module.current_stream().ready_s > 0
    x.fill_(1)
    assert side.ready_s < sim.module.current_stream().ready_s
    sim.module.current_stream().record_event().wait(side)
    assert side.ready_s == sim.module.current_stream().ready_s


def test_an_event_recorded_too_early_does_not_order_later_work(sim, side):
    x = torch.zeros(8, device=sim.device)
    side.wait_stream(sim.module.current_stream())
    early = side.record_event()
    with sim.module.stream(side):
        x.fill_(1)
    early.wait()
    with races(sim, "RAW"):
        x.sum()


def test_events_measure_virtual_milliseconds(sim):
    sim(rates=Rates(memory_bytes_per_s=1000.0, kernel_launch_s=0.0, host_launch_s=0.0))
    x = torch.zeros(500, dtype=torch.uint8, device=sim.device)
    start, end = (sim.module.Event(enable_timing=True) for _ in range(2))
    start.record()
    x.fill_(3)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(500.0)


def test_what_was_recorded_before_a_fresh_start_orders_nothing(sim):
    for _ in range(9):
        torch.ones(1, device=sim.device)
    old = sim.module.current_stream()
    event = old.record_event()
    sim()
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    side.wait_event(event)
    side.wait_stream(old)
    old.synchronize()
    with sim.module.stream(side), races(sim, "RAW"):
        x.sum()
    assert event.query()


def test_what_is_not_a_stream_says_what_to_make(sim):
    match = r" is not a stream of sim: .* Make one with torch\.sim\.Stream\(\)"
    for use in (sim.module.stream, sim.module.Event().record):
        for value in (5, torch.Stream("sim")):
            with pytest.raises(TypeError, match=match):
                use(value)
    assert sim.module.current_stream() is sim.module.default_stream()


def leaf(device="sim:0"):
    return torch.ones(4, device=device, requires_grad=True)


def test_nodes_hooks_and_callbacks_run_on_the_stream_around_the_pass(sim, side):
    x, streams = leaf(), []

    def note(*_):
        streams.append(sim.module.current_stream())

    def ask(_):
        note()
        torch.autograd.Variable._execution_engine.queue_callback(note)

    y = x.exp()
    y.register_hook(ask)
    loss = y.sum()
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        loss.backward()
    assert streams == [side, side]
    with races(sim, "no wait orders the two"):
        x.grad.sum()


def test_a_gradient_that_a_hook_makes_elsewhere_is_used_without_a_wait(sim, side):
    def make_elsewhere(grad):
        side.wait_stream(sim.module.current_stream())
        with sim.module.stream(side):
            return grad * 2

    y = leaf().exp()
    y.register_hook(make_elsewhere)
    with races(sim, r"stream 0 reads .* that stream \d+"):
        y.sum().backward()


def test_devices_have_streams_of_their_own_in_a_pass(sim):
    sim(devices=2)
    side = sim.module.Stream("sim:1")
    x, streams = leaf("sim:1"), []
    x.register_hook(lambda grad: streams.append(sim.module.current_stream("sim:1")))
    side.wait_stream(sim.module.current_stream("sim:1"))
    with sim.module.stream(side):
        x.exp().sum().backward()
    assert streams == [side]
    side.synchronize()
