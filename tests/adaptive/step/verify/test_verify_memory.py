"""Verifying a split never runs the step out of memory, wherever memory runs out."""

import pytest
import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, SplitMismatchError, step
from tenure.testing import for_each_allocation


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step.. split a batch:UserWarning")
def test_a_failure_at_any_allocation_of_the_verification_changes_nothing(sim):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to(sim.device)
    x = torch.randn(12, 6).to(sim.device)

    def run(verify):
        torch.manual_seed(7)
        sim.module.manual_seed(7)
        return step(
            lambda b: net(b).square().mean(),
            x,
            maximum=4,
            verify=verify,
            cache_type=NoBatchsizeCache,
        )

    loss = float(run(False).loss)
    gradients = [p.grad.cpu() for p in net.parameters()]
    net.zero_grad()
    at_rest = sim.allocated_bytes
    seen = set()

    def check(failure):
        assert failure.error is None
        sizes = failure.result.sizes
        seen.add(sizes)
        if sizes == (4, 4, 4):
            assert float(failure.result.loss) == loss
            assert all(map(torch.equal, gradients, [p.grad.cpu() for p in net.parameters()]))
        del failure
        net.zero_grad()
        assert sim.allocated_bytes <= at_rest + 512

    assert for_each_allocation(lambda: run(True), check) > 40
    assert (4, 4, 4) in seen


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")  # the budget is less than a segment
def test_a_budget_for_the_micro_batches_alone_is_kept_and_wrong_losses_are_refused(sim):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    net = nn.Sequential(*layers).to(sim.device)
    x = torch.randn(4096, 64).to(sim.device)  # each activation takes 1 MiB
    sim.reset_peak()
    at_rest = sim.allocated_bytes
    step(lambda b: net(b).square().mean(), x)
    net.zero_grad()
    sim.budget_bytes = at_rest + (sim.peak_bytes - at_rest) // 3
    assert len(step(lambda b: net(b).square().mean(), x).sizes) > 1
    net.zero_grad()
    with pytest.raises(SplitMismatchError, match=r"then=torch\.sqrt"):
        step(lambda b: net(b).square().mean().sqrt(), x)
    assert all(p.grad is None for p in net.parameters())
