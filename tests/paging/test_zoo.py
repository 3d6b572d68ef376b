"""Every kind of model computes the same paged as on the device whole, within any budget."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_map

from tenure.paging import PagingError, page, plan_paging

from .models import ZOO, build


def home(tree):
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, tree)


def on_device(tree, device):
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


def on_whole_device(sim, model, args, kwargs):
    """The output of a copy that is on the device whole, and the most that all else took there."""
    whole = copy.deepcopy(model).to(sim.device)
    sim.reset_peak()
    before_bytes = sim.allocated_bytes
    args, kwargs = on_device((args, kwargs), sim.device)
    with torch.no_grad():
        output = whole(*args, **kwargs)
    return home(output), sim.peak_bytes - before_bytes


def percent_of_weights(model, device, percent):
    """That share of the weights, or the least that the model can be paged in."""
    weight_bytes = plan_paging(model, device).weight_bytes
    wanted_bytes = weight_bytes * percent // 100
    try:
        plan_paging(model, device, budget=wanted_bytes)
    except PagingError as error:
        return error.minimum_bytes
    return wanted_bytes


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run_paged(sim, model, args, kwargs, budget_bytes, activation_bytes):
    sim()
    with page(model, sim.device, budget=budget_bytes) as handle:
        assert sim.allocated_bytes <= handle.plan.allocated_bytes <= budget_bytes
        for _ in range(3):
            with torch.no_grad():
                yield home(model(*args, **kwargs))
    assert sim.allocated_bytes == 0
    assert sim.peak_bytes <= budget_bytes + activation_bytes


@pytest.mark.parametrize("percent", [25, 75])
@pytest.mark.parametrize("name", ZOO)
def test_outputs_equal_those_of_the_whole_model_and_the_peak_stays_below_the_budget(
    sim, name, percent
):
    model, args, kwargs = build(name)
    expected, activation_bytes = on_whole_device(sim, model, args, kwargs)
    state = copy.deepcopy(model.state_dict())
    budget_bytes = percent_of_weights(model, sim.device, percent)
    try:
        outputs = list(run_paged(sim, model, args, kwargs, budget_bytes, activation_bytes))
    except PagingError as error:  # which weights a forward holds at once, only running it tells
        assert name == "functional"
        budget_bytes = error.minimum_bytes
        outputs = list(run_paged(sim, model, args, kwargs, budget_bytes, activation_bytes))
    for output in outputs:
        assert_equal(output, expected)
    assert_equal(model.state_dict(), state)
