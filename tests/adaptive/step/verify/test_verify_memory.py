"""Verifying a split never runs the step out of memory, wherever memory runs out."""

import pytest
import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, SplitMismatchError, step
from tenure.testing import for_each_allocation


def _rig(sim):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to(sim.device)
    return net, torch.randn(12, 6).to(sim.device)


def _run(sim, net, x, verify):
    torch.manual_seed(7)
    sim.module.manual_seed(7)
    return step(
        lambda b: net(b).square().mean(),
        x,
        maximum=4,
        verify=verify,
        cache_type=NoBatchsizeCache,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step.. split a batch:UserWarning")
def test_a_failure_at_any_allocation_of_the_verification_changes_nothing(sim):
    net, x = _rig(sim)
    result = _run(sim, net, x, False)
    wanted = [p.grad.cpu() for p in net.parameters()], float(result.loss)
    del result
    net.zero_grad()
    at_rest = sim.allocated_bytes
    whole = set()

    def check(failure):
        assert failure.error is None
        sizes = failure.result.sizes
        whole.add(sizes)
        if sizes == (4, 4, 4):
            assert float(failure.result.loss) == wanted[1]
            for p, gradient in zip(net.parameters(), wanted[0], strict=True):
                assert torch.equal(p.grad.cpu(), gradient)
        del failure
        net.zero_grad()
        assert sim.allocated_bytes <= at_rest + 512

    assert for_each_allocation(lambda: _run(sim, net, x, True), check) > 40
    assert (4, 4, 4) in whole


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")  # the budget is less than a segment
def test_a_budget_for_the_micro_batches_alone_is_kept_and_wrong_losses_are_refused(sim):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    net = nn.Sequential(*layers).to(sim.device)
    x = torch.randn(16384, 64).to(sim.device)  # each activation takes 4 MiB
    sim.reset_peak()
    at_rest = sim.allocated_bytes
    step(lambda b: net(b).square().mean(), x)
    budget = at_rest + (sim.peak_bytes - at_rest) // 3
    net.zero_grad()
    sim.budget_bytes = budget
    result = step(lambda b: net(b).square().mean(), x)
    assert len(result.sizes) > 1
    net.zero_grad()
    with pytest.raises(SplitMismatchError, match=r"then=torch\.sqrt"):
        step(lambda b: net(b).square().mean().sqrt(), x)
    assert all(p.grad is None for p in net.parameters())
