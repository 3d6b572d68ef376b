"""Virtual time: the speeds of the device and of copies, and when the host waits."""

import pytest
import torch

from tenure.testing import Rates

pytestmark = pytest.mark.simdevice

RATES = Rates(
    h2d_bytes_per_s=100.0, d2h_bytes_per_s=50.0, pageable_bytes_per_s=10.0, copy_latency_s=1.0,
    flops_per_s=1000.0, memory_bytes_per_s=1000.0, kernel_launch_s=0.5,
    host_launch_s=0.25, host_copy_s=0.125, host_poll_s=0.0625,
)  # fmt: skip
SLOW = Rates(
    h2d_bytes_per_s=1000.0, d2h_bytes_per_s=500.0, pageable_bytes_per_s=100.0,
    copy_latency_s=0.0, host_copy_s=0.0,
)  # fmt: skip


def test_a_kernel_takes_the_slowest_of_its_parts_and_a_copy_its_latency_and_speed():
    assert RATES.kernel_s(flops=2000, n_bytes=10) == 2.0
    assert RATES.kernel_s(flops=0, n_bytes=3000) == 3.0
    assert RATES.kernel_s(flops=0, n_bytes=0) == 0.5
    assert RATES.copy_s(100, to_device=True, pinned=True) == 2.0
    assert RATES.copy_s(100, to_device=False, pinned=True) == 3.0
    assert RATES.copy_s(100, to_device=True, pinned=False) == 11.0


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("h2d_bytes_per_s", 0, "more than 0"),
        ("flops_per_s", float("nan"), "more than 0"),
        ("copy_latency_s", -1e-6, "0 or more"),
    ],
)
def test_a_speed_that_no_machine_has_is_refused(name, value, least):
    with pytest.raises(ValueError, match=rf"Rates\({name}=.*\): must be {least}\."):
        Rates(**{name: value})


def test_work_of_two_streams_on_one_engine_runs_in_launch_order(sim):
    sim(rates=RATES)
    hosts = [torch.zeros(n_bytes, dtype=torch.uint8).pin_memory() for n_bytes in (100, 50)]
    for host in hosts:
        with sim.module.stream(sim.module.Stream()):
            host.to(sim.device, non_blocking=True)
    assert sim.copied_bytes("h2d") == 150
    assert sim.launches("h2d") == 2
    assert sim.busy_s("h2d") == 3.5
    assert sim.elapsed_s == 0.125 + 3.5
    sim.module.synchronize()


def test_a_matrix_product_takes_the_time_of_its_arithmetic_others_of_their_bytes(sim):
    sim(rates=Rates(flops_per_s=1000.0))
    x = torch.ones(10, 10, device=sim.device)
    before_s = sim.busy_s("compute")
    x @ x
    assert sim.busy_s("compute") - before_s == 2 * 10**3 / 1000.0
    sim(rates=Rates(memory_bytes_per_s=1000.0))
    x = torch.ones(1000, device=sim.device)
    before_s = sim.busy_s("compute")
    x.neg()
    assert sim.busy_s("compute") - before_s == 8000 / 1000.0


def test_pinned_copies_run_at_the_speed_of_the_link_and_pageable_ones_do_not(sim):
    sim(rates=SLOW)
    host = torch.zeros(1000, dtype=torch.uint8)
    device = host.pin_memory().to(sim.device)
    assert sim.busy_s("h2d") == 1.0
    host.to(sim.device)
    assert sim.busy_s("h2d") == 1.0 + 10.0
    device.cpu()
    assert sim.busy_s("d2h") == 10.0
    assert (sim.copied_bytes("h2d"), sim.copied_bytes("d2h")) == (2000, 1000)


@pytest.mark.parametrize(
    ("host", "device", "speed"),
    [
        (torch.zeros(4, 2).t(), torch.zeros(2, 4), SLOW.pageable_bytes_per_s),
        (torch.zeros(2, 8)[:, ::2], torch.zeros(2, 4), SLOW.pageable_bytes_per_s),
        (torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, 4), SLOW.pageable_bytes_per_s),
        (torch.zeros(2, 8)[:, ::2], torch.zeros(2, 8)[:, ::2], SLOW.pageable_bytes_per_s),
        # of the same layout, and a part of a pinned buffer
        (torch.zeros(2, 3).t(), torch.zeros(2, 3).t(), SLOW.h2d_bytes_per_s),
        (torch.zeros(10, 4)[2:5], torch.zeros(3, 4), SLOW.h2d_bytes_per_s),
    ],
)
def test_a_copy_that_changes_type_or_layout_is_as_slow_as_a_pageable_one(sim, host, device, speed):
    sim(rates=SLOW)
    memory = host.untyped_storage()
    sim.module.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes(), 0)
    target = torch.empty_strided(device.size(), device.stride(), device=sim.device)
    before = sim.host_waits
    target.copy_(host, non_blocking=True)
    assert sim.busy_s("h2d") == pytest.approx(target.nbytes / speed)
    assert sim.host_waits == before + (speed == SLOW.pageable_bytes_per_s)
    sim.module.synchronize()
    sim.module.cudart().cudaHostUnregister(memory.data_ptr())


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"), [(True, True, 0), (True, False, 1), (False, True, 1)]
)
def test_only_an_asynchronous_copy_from_pinned_memory_lets_the_host_run_on(
    sim, pinned, non_blocking, waits
):
    host = torch.zeros(100).pin_memory() if pinned else torch.zeros(100)
    host.to(sim.device, non_blocking=non_blocking)
    assert sim.host_waits == waits
    sim.module.synchronize()


def test_reading_a_number_stops_the_host(sim):
    x = torch.ones(3, device=sim.device)
    waits = sim.host_waits
    assert x.sum().item() == 3
    assert bool(torch.equal(x, x))
    assert x.nonzero().shape == (3, 1)
    assert sim.host_waits == waits + 3
