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


def blocks_of_two():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(8)]
    return nn.Sequential(*blocks).eval()


@torch.no_grad()
def test_what_is_in_use_held_or_kept_is_not_given_back(sim):
    model, x = blocks_of_two(), torch.randn(2, 16, device=sim.device)
    plain = copy.deepcopy(model).to(sim.device)
    unit_bytes = max(unit.n_bytes for unit in plan_paging(model, sim.device, "2500B").units)
    held, stays = [], []
    with page(model, sim.device, "2500B", budget=6 * unit_bytes, keep=("7",)) as handle:
        engine = handle._pager.engine
        resident = [block for block in model if engine.stays(unit_of(block))]
        first, second, last = resident[0], resident[1], model[7]
        first[0].register_forward_hook(lambda module, *_: held.append(module.weight))

        def give_back(*_):
            engine.room.give_back(10**9)
            stays[:] = [engine.stays(unit_of(block)) for block in (first, second, last)]

        second[1].register_forward_pre_hook(give_back)
        assert len(resident) > 3
        assert torch.equal(model(x), plain(x))
        assert stays == [True] * 3
        assert not all(engine.stays(unit_of(block)) for block in resident)
        held.clear()
    sim.finish()


def unit_of(block):
    return block[0]._parameters._hosts["weight"].unit


@torch.no_grad()
def test_between_two_modules_of_a_unit_it_stays_while_a_page_is_held(sim):
    model, x = blocks_of_two(), torch.randn(2, 16, device=sim.device)
    unit_bytes = max(unit.n_bytes for unit in plan_paging(model, sim.device, "2500B").units)
    held = []
    with page(model, sim.device, "2500B", budget=5 * unit_bytes) as handle:
        passes = next(each for each in model if not handle._pager.engine.stays(unit_of(each)))
        passes[0].register_forward_hook(lambda module, *_: held.append(module.weight))
        for _ in range(4):
            held.clear()
            model(x)
        report = handle.report()
        passing = sum(unit.n_bytes for unit in handle.plan.units if not unit.resident)
        assert passing
        assert report.faults == 0
        held.clear()
