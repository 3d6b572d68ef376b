"""Virtual time: the speeds of the device, and threads that launch beside each other."""

import pytest
import torch

from tenure.testing import Rates

# The time of the host, which no figure tells.
from tests.testing.machine import machine

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


def test_a_kernel_takes_the_slowest_of_arithmetic_traffic_and_launch():
    assert RATES.kernel_s(flops=2000, n_bytes=10) == 2.0
    assert RATES.kernel_s(flops=0, n_bytes=3000) == 3.0
    assert RATES.kernel_s(flops=0, n_bytes=0) == 0.5


def test_a_copy_takes_its_latency_and_the_speed_of_its_kind():
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


def test_an_engine_that_does_not_exist_is_refused(sim):
    for figure in (sim.busy_s, sim.copied_bytes, sim.launches):
        with pytest.raises(ValueError, match="there is no engine 'H2D'; there are"):
            figure("H2D")


def test_a_thread_of_autograds_goes_on_launching_while_the_caller_waits(sim):
    """The calling thread waits for an event of a second; nodes on the device launch meanwhile."""
    launched_s = []

    class Long(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            launched_s.append(machine.clock.host_s)
            sim.launch_kernel(1.0)
            return gradient

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.to(sim.device)

        @staticmethod
        def backward(ctx, gradient):
            event = sim.module.Event()
            event.record()
            events.append(event)
            return torch.zeros(1)

    class Host(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            events.pop().synchronize()
            return gradient

    events = []
    leaf = torch.ones(1, requires_grad=True)
    x = torch.ones(1, device=sim.device, requires_grad=True)
    y = Long.apply(Long.apply(x) + Wait.apply(Host.apply(leaf)))
    before_s = machine.clock.host_s
    y.backward()
    assert len(launched_s) == 2
    assert max(launched_s) - before_s < 0.5
    assert machine.clock.host_s - before_s >= 1.0
