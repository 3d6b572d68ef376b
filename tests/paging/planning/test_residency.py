"""How near to the limit of link and computation passes run, on the virtual clock.

The workloads are those of `benchmarks/bench_paging.py` with bytes and speeds a thousandth, so that
every time is the same.
"""

from itertools import cycle, islice

import pytest
import torch
from torch import nn

from tenure.paging._functions import carry_out
from tenure.paging._host._host_buffers import HostBuffers
from tenure.paging._link._link import Link
from tenure.paging._planning._division import LinkSpeed
from tenure.paging._planning._plan import make_plan
from tenure.testing import Rates
from tenure.testing._device._blocks import span_of
from tenure.testing._device._machine import machine
from tenure.testing._device._streams import current_stream

pytestmark = pytest.mark.sim_allocator("exact")  # about times, which no allocator changes

LINK_BYTES_PER_S = 24e6
UNEVEN = list(islice(cycle([56_000, 8_000]), 12))


class Timed(nn.Module):
    """Bytes, and a kernel over them that takes a given virtual time."""

    def __init__(self, n_bytes, compute_s):
        super().__init__()
        self.register_buffer("weight", torch.zeros(n_bytes, dtype=torch.uint8))
        self.compute_s = compute_s

    def forward(self, x):
        stream = current_stream()
        machine.launch("kernel", stream, [span_of(self.weight)], [])
        machine.clock.host_s += machine.clock.rates.host_launch_s
        machine.clock._occupy(stream, "compute", self.compute_s)
        return x


def share_of_limit(sim, block_bytes, budget_bytes, ratio):
    """The share; the plan must have predicted the time of a pass."""
    sim(rates=Rates(h2d_bytes_per_s=LINK_BYTES_PER_S))
    times = [ratio * n_bytes / LINK_BYTES_PER_S for n_bytes in block_bytes]
    model = nn.Sequential(*map(Timed, block_bytes, times)).eval()
    link = LinkSpeed(LINK_BYTES_PER_S, sim.rates.copy_latency_s)
    planned = make_plan(model, sim.device, "0B", budget_bytes, (), link, sum(times))
    x, stream = torch.zeros(1, device=sim.device), current_stream()
    link = Link(sim.device)
    store = HostBuffers(sim.device, pin=True)
    with carry_out(model, planned, link, store, None) as handle:
        for _ in range(3):
            model(x)
        begin_s, begin_bytes = stream.ready_s, sim.copied_bytes("h2d")
        for _ in range(3):
            model(x)
        pass_s = (stream.ready_s - begin_s) / 3
        copied_bytes = sim.copied_bytes("h2d") - begin_bytes
        assert handle.report().faults == 0
    passing_bytes = sum(unit.n_bytes for unit in handle.plan.units if not unit.resident)
    # no byte is moved twice; where a pass ends, more or less of the next one may be there
    assert abs(copied_bytes - 3 * passing_bytes) <= handle.plan.ring_bytes
    assert sim.peak_bytes - x.nbytes <= handle.plan.allocated_bytes <= budget_bytes
    assert handle.plan.predicted_s == pytest.approx(pass_s, rel=0.05)
    return max(passing_bytes / LINK_BYTES_PER_S, sum(times)) / pass_s


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.95, 1.5])
@pytest.mark.parametrize(
    ("block_bytes", "budget_bytes", "least"),
    [
        pytest.param([32_256] * 24, 71_000, 0.97, id="even"),
        pytest.param([8_192] * 12, 26_000, 0.94, id="small"),
        pytest.param(UNEVEN, 138_000, 0.92, id="uneven"),
        pytest.param([32_256] * 24, 14 * 32_256 + 8_000, 0.95, id="half-stays"),
    ],
)
def test_a_pass_takes_hardly_longer_than_the_limit(sim, block_bytes, budget_bytes, least, ratio):
    assert share_of_limit(sim, block_bytes, budget_bytes, ratio) >= least
