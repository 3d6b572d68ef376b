import threading

import pytest
import torch

from tenure.testing import RaceError, Rates


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
    assert module.current_stream() is module.default_stream()
    assert repr(side).startswith(f"<sim.Stream {side.stream_id}, ready_s=")


def test_another_thread_works_on_the_default_stream_until_it_chooses(sim):
    side, other = sim.module.Stream(), sim.module.Stream()
    seen = []

    def work():
        seen.append(sim.module.current_stream())
        with sim.module.stream(other):
            seen.append(sim.module.current_stream())

    with sim.module.stream(side):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert sim.module.current_stream() is side
    assert seen == [sim.module.default_stream(), other]


def test_a_wait_moves_the_waiting_stream_on_the_virtual_clock(sim):
    x = torch.zeros(1 << 16, device=sim.device)
    side = sim.module.Stream()
    side.wait_stream(sim.module.current_stream())
    assert side.ready_s == sim.module.current_stream().ready_s > 0
    x.fill_(1)
    assert side.ready_s < sim.module.current_stream().ready_s
    sim.module.current_stream().record_event().wait(side)
    assert side.ready_s == sim.module.current_stream().ready_s


def test_an_event_recorded_too_early_does_not_order_later_work(sim):
    x = torch.zeros(8, device=sim.device)
    side = sim.module.Stream()
    side.wait_stream(sim.module.current_stream())
    early = side.record_event()
    with sim.module.stream(side):
        x.fill_(1)
    early.wait()
    with pytest.raises(RaceError, match="RAW"):
        x.sum()
    assert len(sim.take_faults()) == 1
    sim.module.synchronize()


def test_events_measure_virtual_milliseconds(sim):
    sim(rates=Rates(memory_bytes_per_s=1000.0, kernel_launch_s=0.0, host_launch_s=0.0))
    x = torch.zeros(500, dtype=torch.uint8, device=sim.device)
    start = sim.module.Event(enable_timing=True)
    end = sim.module.Event(enable_timing=True)
    start.record()
    x.fill_(3)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(500.0)


def test_what_was_recorded_before_a_fresh_start_orders_nothing(sim):
    for _ in range(9):
        torch.ones(1, device=sim.device)
    event, old = sim.module.current_stream().record_event(), sim.module.current_stream()
    sim()
    x = torch.ones(4, device=sim.device)
    side = sim.module.Stream()
    side.wait_event(event)
    side.wait_stream(old)
    old.synchronize()
    with sim.module.stream(side), pytest.raises(RaceError, match="RAW"):
        x.sum()
    assert event.query()
    side.wait_stream(sim.module.current_stream())
    assert len(sim.take_faults()) == 1


def test_what_is_not_a_stream_says_what_to_make(sim):
    match = r" is not a stream of sim: .* Make one with torch\.sim\.Stream\(\)"
    for use in (sim.module.stream, sim.module.Event().record):
        for value in (5, torch.Stream("sim")):
            with pytest.raises(TypeError, match=match):
                use(value)
    assert sim.module.current_stream() is sim.module.default_stream()
