"""Whatever a model calls, in whatever order and within whatever budget, the numbers are right."""

import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tenure.paging import page, plan_paging
from tests.shrinking import ask_to_shrink

from .support import FIXTURES_ONCE

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


@settings(FIXTURES_ONCE, max_examples=15)
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


class Chosen(nn.Module):
    """Runs layers in the order of their names, and fails at a capital letter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abcdefgh"})

    def forward(self, x, names):
        for name in names:
            x = self.layers[name](x)
        return x


@pytest.mark.parametrize(
    ("passes", "faults"),
    [
        # the prediction goes on behind a layer that was not expected
        (["abcdefgh", "abcdefgh", "abefgh"], 0),
        (["abcdefgh", "abcdefgh", "hgfedcba"], 4),
        # a pass that failed teaches nothing
        (["abcdefgh", "abcdefgh", "hX", "abcdefgh", "abcdefgh"], 0),
    ],
)
@torch.no_grad()
def test_layers_are_fetched_ahead_in_the_order_of_the_last_pass(sim, passes, faults):
    model, x = Chosen().eval(), torch.randn(2, 16, device=sim.device)
    plain = copy.deepcopy(model).to(sim.device)
    with page(model, sim.device, 1, budget=4 * 1536) as handle:
        for names in passes:
            if "X" in names:
                with pytest.raises(KeyError):
                    model(x, names)
            else:
                assert torch.equal(model(x, names), plain(x, names))
        found = handle.report().faults
    assert found == 0 if not faults else found >= faults


@torch.no_grad()
def test_memory_that_is_in_use_held_or_kept_is_not_given_back(sim):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(10)]).eval()
    x, held, given_bytes = torch.randn(2, 16, device=sim.device), [], []
    plain = copy.deepcopy(model).to(sim.device)
    model[0].register_forward_hook(lambda module, *_: held.append(module.weight))
    model[5].register_forward_pre_hook(lambda *_: given_bytes.append(ask_to_shrink("sim", 1 << 40)))
    with page(model, sim.device, 1, budget=8 * 1536, keep=("9",)) as handle:
        resident_bytes = [handle.plan.resident_bytes]
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
            resident_bytes.append(handle.report().resident_bytes)
            assert torch.equal(held.pop(), plain[0].weight)
        assert given_bytes[0] > 0
        assert resident_bytes[0] > resident_bytes[1] >= 1536
    sim.finish()


def lines_of_a_pass(n_blocks, folder):
    """How many lines of Python a pass runs on this thread: a clock would tell what else runs."""
    blocks = [nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(n_blocks)]
    model, x = nn.Sequential(*blocks).eval(), torch.randn(2, 4)
    n_bytes = plan_paging(model, "cpu", budget="1GiB", host=folder).weight_bytes
    n_lines = 0

    def count(frame, event, argument):
        nonlocal n_lines
        n_lines += 1
        return count

    with page(model, "cpu", budget=int(n_bytes * 0.6), host=folder):
        for _ in range(2):
            model(x)
        before = sys.gettrace()
        sys.settrace(count)
        try:
            model(x)
        finally:
            sys.settrace(before)
    return n_lines


@torch.no_grad()
def test_a_pass_over_four_times_as_many_modules_runs_four_times_as_many_lines(tmp_path):
    few, many = (lines_of_a_pass(n_blocks, tmp_path) for n_blocks in (10, 40))
    assert many <= 4.6 * few
