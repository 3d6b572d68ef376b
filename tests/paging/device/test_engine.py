"""Whatever a model calls, in whatever order and within whatever budget, the numbers are right."""

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tenure.paging import page, plan_paging

WIDTHS = (4, 16, 8, 32, 12, 24)
CALLS = st.lists(st.integers(0, len(WIDTHS) - 1), max_size=8)


class Steps(nn.Module):
    """Calls layers in a given order; every other one is only read, and its buffer counted up."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, width) for width in WIDTHS])
        self.layers += [nn.Linear(width, 16) for width in WIDTHS]
        for layer in self.layers:
            layer.register_buffer("count", torch.zeros(1))

    def forward(self, x, calls):
        for number in calls:
            wide, narrow = self.layers[number], self.layers[number + len(WIDTHS)]
            hidden = torch.nn.functional.linear(x, wide.weight, wide.bias)
            wide.count += 1
            x = torch.tanh(narrow(hidden)) + x
        return x


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    passes=st.lists(CALLS, min_size=1, max_size=4),
    percent=st.integers(0, 110),
    prefetch=st.sampled_from(["auto", 0, 1, 2]),
    bump=st.integers(0, 2 * len(WIDTHS) - 1),
)
def test_any_order_of_calls_gives_the_numbers_of_the_plain_model(
    sim, passes, percent, prefetch, bump
):
    torch.manual_seed(0)
    model, x = Steps().eval(), torch.randn(2, 16)
    weight_bytes = plan_paging(model, sim.device).weight_bytes
    # what is read and what is called are in use together, and the reader may still hold the one
    least_bytes = 3 * max(unit.n_bytes for unit in plan_paging(model, sim.device, 1).units)
    budget_bytes = max(least_bytes, weight_bytes * percent // 100)
    sim()
    plain = copy.deepcopy(model).to(sim.device)
    x = x.to(sim.device)
    with torch.no_grad(), page(model, sim.device, 1, budget=budget_bytes, prefetch=prefetch):
        for calls in passes:
            assert torch.equal(model(x, calls), plain(x, calls))
            for layer, twin in zip(model.layers, plain.layers, strict=True):
                assert torch.equal(layer.count, twin.count.cpu())
            model.layers[bump].weight.data += 0.5
            plain.layers[bump].weight.data += 0.5
    sim.finish()
