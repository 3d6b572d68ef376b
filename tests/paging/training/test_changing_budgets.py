"""Training within budgets that change, bit for bit as on the device whole."""

import pytest
import torch
from torch.nn import functional as F

from tenure.paging import PagingBudget, page

from ..sharing.test_budget import bytes_of, linears
from .blocks import inputs


def train(both, batches):
    """Steps of both; that they are equal after each."""
    optimizers = {m: torch.optim.SGD(m.parameters(), lr=0.1) for m in (both.host, both.there)}

    def step(model, x):
        optimizers[model].zero_grad()
        loss = F.mse_loss(model(x), torch.zeros_like(x))
        loss.backward()
        return loss.detach().cpu()

    for x in batches:
        one, other = both.run(lambda model, x=x: step(model, x))
        assert torch.equal(one, other)
        assert not both.gradients_differ()
        for optimizer in optimizers.values():
            optimizer.step()
        yield
    assert not both.values_differ()


def test_it_trains_in_turns_with_a_model_that_is_only_called(sim, pair):
    both, other = pair(), linears(16)
    budget = PagingBudget((both.weight_bytes + bytes_of(other)) // 2)
    x = torch.randn(4, 64)
    with (
        page(both.host, sim.device, budget=budget, training=True),
        page(other, sim.device, budget=budget),
    ):
        for _ in train(both, inputs(sim)):
            assert budget.held_bytes <= budget.limit_bytes
            with torch.no_grad():
                for _ in range(3):
                    other(x)


@pytest.mark.sim_allocator("exact")
def test_it_trains_in_what_is_free_while_others_take_and_return_some(sim, pair):
    both = pair()
    memory = sim.allocated_bytes + both.weight_bytes * 3
    sim.budget_bytes = memory
    with page(both.host, sim.device, budget="auto", training=True) as handle:
        found = []
        for i, _ in enumerate(train(both, inputs(sim, 14))):
            found.append(handle.report().resident_bytes)
            sim.budget_bytes = memory - (i in (3, 4, 5)) * (memory - sim.allocated_bytes) // 2
        assert sim.oom_count == 0
        assert len(found) == 14
