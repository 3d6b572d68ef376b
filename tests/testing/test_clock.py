"""Virtual time: the speeds of the device, and threads that launch beside each other."""

import pytest
import torch

from tenure.testing import Rates

pytestmark = pytest.mark.simdevice

RATES = Rates(
    h2d_bytes_per_s=100.0,
    d2h_bytes_per_s=50.0,
    pageable_bytes_per_s=10.0,
    copy_latency_s=1.0,
    flops_per_s=1000.0,
    memory_bytes_per_s=1000.0,
    kernel_launch_s=0.5,
    host_launch_s=0.25,
    host_copy_s=0.125,
    host_poll_s=0.0625,
)


def test_a_kernel_takes_the_slowest_of_its_parts_and_a_copy_its_latency_and_speed():
    assert RATES.kernel_s(flops=2000, n_bytes=10) == 2.0
    assert RATES.kernel_s(flops=0, n_bytes=3000) == 3.0
    assert RATES.kernel_s(flops=0, n_bytes=0) == 0.5
    assert RATES.copy_s(100, to_device=True, pinned=True) == 2.0
    assert RATES.copy_s(100, to_device=False, pinned=True) == 3.0
    assert RATES.copy_s(100, to_device=True, pinned=False) == 11.0


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
