"""How near to the limit of link and computation passes and steps run, on the virtual clock.

The workloads of passes are those of `benchmarks/bench_paging.py` with bytes and speeds a
thousandth, so that every time is the same.
"""

from itertools import cycle, islice

import pytest
import torch
from torch import nn

from tenure.paging import page, plan_paging
from tenure.testing import Rates

# About times, which no allocator changes.
pytestmark = pytest.mark.sim_allocator("exact")


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        made = torch.empty_like(x)
        ctx.save_for_backward(weight, made)
        ctx.layer = layer
        layer.sim.launch_kernel(layer.compute_s, reads=[weight, x], writes=[made])
        return made

    @staticmethod
    def backward(ctx, gradient):
        weight, saved = ctx.saved_tensors
        made = torch.empty_like(weight)
        reads = [weight, saved]
        ctx.layer.sim.launch_kernel(2 * ctx.layer.compute_s, reads=reads, writes=[made])
        return gradient, made, None


class Layer(nn.Module):
    """Bytes; its forward takes a given time, its backward pass twice that."""

    def __init__(self, sim, n_bytes, compute_s):
        super().__init__()
        self.sim, self.compute_s = sim, compute_s
        self.weight = nn.Parameter(torch.zeros(n_bytes // 4))

    def forward(self, x):
        return _Timed.apply(x, self.weight, self)


LINK_BYTES_PER_S = 24e6
# What a plan adds for each copy; the simulated link takes less.
ASSUMED_LATENCY_S = 30e-6
UNEVEN = list(islice(cycle([56_000, 8_000]), 12))


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
@torch.no_grad()
def test_a_pass_takes_hardly_longer_than_the_limit(sim, block_bytes, budget_bytes, least, ratio):
    sim(rates=Rates(h2d_bytes_per_s=LINK_BYTES_PER_S))
    times = [ratio * n_bytes / LINK_BYTES_PER_S for n_bytes in block_bytes]
    blocks = [Layer(sim, *each) for each in zip(block_bytes, times, strict=True)]
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
    # an input, and the output of a layer or two
    assert sim.peak_bytes - 3 * x.nbytes <= plan.allocated_bytes <= budget_bytes
    latency_s = len(passing) * (ASSUMED_LATENCY_S - sim.rates.copy_latency_s)
    assert plan.predicted_s - latency_s == pytest.approx(pass_s, rel=0.05)
    assert max(passing_bytes / LINK_BYTES_PER_S, sum(times)) / pass_s >= least


N_LAYERS, N_BYTES = 12, 96 * 1024
BYTES_PER_S = 1e9
COPY_S = N_BYTES / BYTES_PER_S


@pytest.mark.parametrize(
    ("ratio", "activations", "least"),
    [
        (0.1, None, 0.93),
        (0.95, None, 0.93),
        (1.5, None, 0.93),
        (0.1, "host", 0.88),
        (1.5, "host", 0.88),
    ],
)
def test_a_step_runs_near_its_limit_and_copies_nothing_twice(sim, ratio, activations, least):
    latencies = ("host_launch_s", "host_copy_s", "copy_latency_s", "kernel_launch_s")
    speeds = {"h2d_bytes_per_s": BYTES_PER_S, "d2h_bytes_per_s": BYTES_PER_S}
    sim(rates=Rates(**speeds, **dict.fromkeys(latencies, 1e-7)))
    model = nn.Sequential(*[Layer(sim, N_BYTES, ratio * COPY_S) for _ in range(N_LAYERS)])
    weights_bytes, saved_bytes = N_LAYERS * N_BYTES, N_BYTES // 2 if activations else 0
    x = torch.zeros(max(1, saved_bytes // 4), device=sim.device, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"budget": weights_bytes // 2, "training": True, "activations": activations}
    with page(model, sim.device, f"{N_BYTES}B", **options) as handle:
        meter = handle._pager.engine.meter
        for _ in range(4):
            begin_s, n_faults = sim.elapsed_s, meter.total_faults
            before = sim.copied_bytes("h2d"), sim.copied_bytes("d2h")
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        elapsed_s, n_faults = sim.elapsed_s - begin_s, meter.total_faults - n_faults
        to_device, to_host = (
            sim.copied_bytes("h2d") - before[0],
            sim.copied_bytes("d2h") - before[1],
        )
    # the first copy to the device and the last one from it are beside nothing
    limit_s = COPY_S * (N_LAYERS * (max(1, ratio) + max(1, 2 * ratio)) + 2)
    assert limit_s - 2 * COPY_S < elapsed_s < limit_s / least
    assert to_host == weights_bytes + N_LAYERS * saved_bytes
    # what is in the budget is there for the backward pass, and the last ones that are saved too
    to_device -= weights_bytes * 3 // 2
    assert (N_LAYERS - 3) * saved_bytes <= to_device <= N_LAYERS * saved_bytes
    assert n_faults <= 1 or activations
