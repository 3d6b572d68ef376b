import threading
from concurrent.futures import ThreadPoolExecutor

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


def test_a_stream_left_by_an_error_is_left(sim):
    side = sim.module.Stream()
    with pytest.raises(KeyError, match="gone"), sim.module.stream(side):
        raise KeyError("gone")
    assert sim.module.current_stream() is sim.module.default_stream()


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


def test_a_backward_pass_runs_on_the_stream_around_it(sim):
    side = sim.module.Stream()
    weight = torch.ones(4, device=sim.device, requires_grad=True)
    side.wait_stream(sim.module.current_stream())
    before_s = side.ready_s
    with sim.module.stream(side):
        (weight * 2).sum().backward()
    assert side.ready_s > before_s
    sim.module.current_stream().wait_stream(side)


def test_a_hook_that_uses_a_stream_leaves_the_thread_of_the_backward_pass_as_it_was(sim):
    side = sim.module.Stream()
    copies = sim.module.Stream()
    x = torch.ones(4, device=sim.device, requires_grad=True)
    streams = []

    def fetch(grad):
        with sim.module.stream(copies):
            pass
        streams.append(sim.module.current_stream())

    for _ in range(2):
        x.register_hook(fetch)
    x.exp().sum().backward()
    sim.module.synchronize()
    with sim.module.stream(side):
        x.exp().sum().backward()
    assert streams == [sim.module.default_stream()] * 2 + [side] * 2
    side.synchronize()


def test_an_event_orders_later_work_of_another_stream(sim):
    x = torch.zeros(1000, device=sim.device)
    side, done = sim.module.Stream(), sim.module.Event()
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        x.fill_(1)
        done.record()
    sim.module.current_stream().wait_event(done)
    assert x.sum().item() == 1000


def test_a_wait_moves_the_waiting_stream_on_the_virtual_clock(sim):
    x = torch.zeros(1 << 16, device=sim.device)
    side = sim.module.Stream()
    side.wait_stream(sim.module.current_stream())
    assert side.ready_s == sim.module.current_stream().ready_s > 0
    x.fill_(1)
    assert side.ready_s < sim.module.current_stream().ready_s
    sim.module.current_stream().record_event().wait(side)
    assert side.ready_s == sim.module.current_stream().ready_s


def test_an_event_that_was_never_recorded_holds_nothing_up(sim):
    event = sim.module.Event()
    sim.module.current_stream().wait_event(event)
    event.synchronize()
    assert event.query()


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


def test_measuring_needs_events_that_were_made_for_it_and_recorded(sim):
    plain = sim.module.Event()
    timed = sim.module.Event(enable_timing=True)
    with pytest.raises(ValueError, match="created with argument 'enable_timing=True'"):
        plain.elapsed_time(timed)
    with pytest.raises(ValueError, match="recorded before calculating elapsed time"):
        timed.elapsed_time(timed)


def test_a_loop_that_asks_an_event_ends_and_orders_the_host(sim):
    x = torch.zeros(1 << 16, device=sim.device)
    side = sim.module.Stream()
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        x.fill_(1)
    done = side.record_event()
    assert not done.query()
    asked = sum(1 for _ in iter(done.query, True))
    assert asked > 0
    assert x.sum().item() == 1 << 16


def test_copies_and_kernels_on_two_streams_overlap_on_the_virtual_clock(sim):
    n_bytes = 1 << 16
    sim(
        rates=Rates(
            h2d_bytes_per_s=1e6,
            memory_bytes_per_s=1e6,
            copy_latency_s=0.0,
            host_launch_s=0.0,
            host_copy_s=0.0,
        )
    )
    host = torch.ones(n_bytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(n_bytes, dtype=torch.uint8, device=sim.device)
    work = torch.empty(n_bytes, dtype=torch.uint8, device=sim.device)
    with sim.module.stream(sim.module.Stream()):
        target.copy_(host, non_blocking=True)
    work.fill_(1)
    share = max(sim.busy_s("h2d"), sim.busy_s("compute")) / sim.elapsed_s
    assert share == 1.0
    sim.module.synchronize()


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


@pytest.mark.parametrize("value", [5, "side"])
def test_what_is_not_a_stream_says_what_to_make(sim, value):
    uses = [
        sim.module.set_stream,
        sim.module.stream,
        sim.module.Event().record,
        sim.module.current_stream().wait_stream,
    ]
    for use in uses:
        match = rf"{value!r} is not a stream of sim: .* Make one with torch\.sim\.Stream\(\)"
        with pytest.raises(TypeError, match=match):
            use(value)
    assert sim.module.current_stream() is sim.module.default_stream()


def test_the_inert_stream_of_torch_is_refused(sim):
    with pytest.raises(TypeError, match=r"is not a stream of sim: nothing would order its work"):
        sim.module.stream(torch.Stream("sim"))


def test_streams_and_events_take_the_arguments_of_cuda(sim):
    assert sim.module.Event(True, True, False).enable_timing
    with pytest.raises(ValueError, match="Expected a sim device, but got: cpu"):
        sim.module.Stream("cpu")
    with pytest.raises(RuntimeError, match="there is no sim:1"):
        sim.module.Stream("sim:1")


def test_backward_in_another_thread_runs_on_the_stream_around_it(sim):
    side = sim.module.Stream()

    def work():
        with sim.module.stream(side):
            x = torch.ones(4, device=sim.device, requires_grad=True)
            (x * 2).sum().backward()
            return x.grad.tolist()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(work).result() == [2, 2, 2, 2]
    assert sim.faults == []
