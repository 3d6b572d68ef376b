"""How near to the limit of link and computation passes run, on the virtual clock.

The workloads are those of `benchmarks/bench_paging.py` with bytes and speeds a thousandth, so that
every time is the same.
"""

from itertools import cycle, islice

import pytest
import torch
from torch import nn

from tenure.paging import page, plan_paging
from tenure.testing import Rates

# About times, which no allocator changes.
pytestmark = pytest.mark.sim_allocator("exact")

LINK_BYTES_PER_S = 24e6
# What a plan adds for each copy; the simulated link takes less.
ASSUMED_LATENCY_S = 30e-6
UNEVEN = list(islice(cycle([56_000, 8_000]), 12))


class Timed(nn.Module):
    """Bytes, and a kernel over them that takes a given virtual time."""

    def __init__(self, sim, n_bytes, compute_s):
        super().__init__()
        self.register_buffer("weight", torch.zeros(n_bytes, dtype=torch.uint8))
        self.sim, self.compute_s = sim, compute_s

    def forward(self, x):
        self.sim.launch_kernel(self.compute_s, reads=[self.weight])
        return x


@pytest.mark.parametrize(
    ("block_bytes", "budget_bytes", "least", "ratio"),
    [
        ([32_256] * 24, 71_000, 0.97, 0.1),
        ([32_256] * 24, 71_000, 0.97, 0.95),
        ([32_256] * 24, 71_000, 0.97, 1.5),
        (UNEVEN, 138_000, 0.92, 0.1),
        (UNEVEN, 138_000, 0.92, 0.95),
        # half stays
        ([32_256] * 24, 14 * 32_256 + 8_000, 0.95, 0.95),
    ],
)
def test_a_pass_takes_hardly_longer_than_the_limit(sim, block_bytes, budget_bytes, least, ratio):
    sim(rates=Rates(h2d_bytes_per_s=LINK_BYTES_PER_S))
    times = [ratio * n_bytes / LINK_BYTES_PER_S for n_bytes in block_bytes]
    blocks = [Timed(sim, *each) for each in zip(block_bytes, times, strict=True)]
    model = nn.Sequential(*blocks).eval()
    told = {"link_bytes_per_s": LINK_BYTES_PER_S, "compute_s": sum(times)}
    plan = plan_paging(model, sim.device, "0B", budget=budget_bytes, **told)
    x, stream = torch.zeros(1, device=sim.device), sim.module.current_stream()
    with page(model, sim.device, "0B", budget=budget_bytes) as handle:
        assert handle.plan.units == plan.units
        for _ in range(3):
            model(x)
        begin_s, begin_bytes = stream.ready_s, sim.copied_bytes("h2d")
        for _ in range(3):
            model(x)
        pass_s = (stream.ready_s - begin_s) / 3
        copied_bytes = sim.copied_bytes("h2d") - begin_bytes
        assert handle.report().faults == 0
    passing = [unit.n_bytes for unit in plan.units if not unit.resident]
    passing_bytes = sum(passing)
    # No byte is moved twice; where a pass ends, more or less of the next one may be there.
    assert abs(copied_bytes - 3 * passing_bytes) <= plan.ring_bytes
    assert sim.peak_bytes - x.nbytes <= plan.allocated_bytes <= budget_bytes
    latency_s = len(passing) * (ASSUMED_LATENCY_S - sim.rates.copy_latency_s)
    assert plan.predicted_s - latency_s == pytest.approx(pass_s, rel=0.05)
    assert max(passing_bytes / LINK_BYTES_PER_S, sum(times)) / pass_s >= least
