"""Copies and computation of a step run side by side, on the virtual clock."""

import pytest
import torch
from torch import nn

from tenure.paging import page
from tenure.testing import Rates

N_LAYERS, N_BYTES = 12, 96 * 1024
BYTES_PER_S = 1e9
COPY_S = N_BYTES / BYTES_PER_S


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
    """Its forward takes a given time, its backward pass twice that."""

    def __init__(self, sim, compute_s):
        super().__init__()
        self.sim, self.compute_s = sim, compute_s
        self.weight = nn.Parameter(torch.zeros(N_BYTES // 4))

    def forward(self, x):
        return _Timed.apply(x, self.weight, self)


def run(sim, ratio, *, saved_bytes=4, **options):
    """The virtual times of steps at half of the weights, and of each its faults."""
    latencies = ("host_launch_s", "host_copy_s", "copy_latency_s", "kernel_launch_s")
    speeds = {"h2d_bytes_per_s": BYTES_PER_S, "d2h_bytes_per_s": BYTES_PER_S}
    sim(rates=Rates(**speeds, **dict.fromkeys(latencies, 1e-7)))
    model = nn.Sequential(*[Layer(sim, ratio * COPY_S) for _ in range(N_LAYERS)])
    x = torch.zeros(saved_bytes // 4, device=sim.device, requires_grad=True)
    told = []
    with page(model, sim.device, f"{N_BYTES}B", budget=N_LAYERS * N_BYTES // 2, training=True,
              **options) as handle:  # fmt: skip
        engine = handle._pager.engine
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            before = sim.elapsed_s, sim.copied_bytes("h2d"), sim.copied_bytes("d2h")
            n_faults = engine.meter.total_faults
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = sim.elapsed_s, sim.copied_bytes("h2d"), sim.copied_bytes("d2h")
            moved = [int(a - b) for a, b in zip(after[1:], before[1:], strict=True)]
            told.append((after[0] - before[0], *moved, engine.meter.total_faults - n_faults))
    return told


@pytest.mark.parametrize("ratio", [0.1, 0.95, 1.5])
def test_a_step_runs_near_its_limit_and_copies_nothing_twice(sim, ratio):
    elapsed_s, to_device, to_host, n_faults = run(sim, ratio)[-1]
    forward_s = N_LAYERS * COPY_S * max(1, ratio)
    backward_s = N_LAYERS * COPY_S * max(1, 2 * ratio)
    # the first copy to the device and the last one from it are beside nothing
    assert forward_s + backward_s < elapsed_s < (forward_s + backward_s + 2 * COPY_S) / 0.93
    assert to_host == N_LAYERS * N_BYTES
    # what is in the budget is there for the backward pass
    assert to_device == N_LAYERS * N_BYTES * 3 // 2
    assert n_faults <= 1


@pytest.mark.parametrize("ratio", [0.1, 1.5])
def test_a_step_with_activations_on_the_host_runs_near_its_limit(sim, ratio):
    saved_bytes = N_BYTES // 2
    *_, last = run(sim, ratio, saved_bytes=saved_bytes, activations="host")
    elapsed_s, to_device, to_host, _ = last
    forward_s = N_LAYERS * COPY_S * max(1, ratio)
    backward_s = N_LAYERS * COPY_S * max(1, 2 * ratio)
    assert elapsed_s < (forward_s + backward_s + 2 * COPY_S) / 0.88
    # the last ones that are saved need not come back
    assert to_host == N_LAYERS * (N_BYTES + saved_bytes)
    assert (N_LAYERS - 3) * saved_bytes <= to_device - N_LAYERS * N_BYTES * 3 // 2
    assert to_device - N_LAYERS * N_BYTES * 3 // 2 <= N_LAYERS * saved_bytes
