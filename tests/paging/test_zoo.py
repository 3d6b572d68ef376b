"""Every kind of model computes the same paged as on the device whole, within any budget."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tenure import ByteSizeError
from tenure.paging import PagingError, chunk, load_paged, page, plan_paging

from .models import ZOO, build, mlp

save_file = pytest.importorskip("safetensors.torch").save_file
KINDS = ["decoder", "functional", "half", "lstm", "resnet", "strided", "tied"]


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


def percent_of_weights(model, device, percent, host="pinned"):
    """That share of the weights, or the least that the model can be paged in."""
    wanted_bytes = plan_paging(model, device, host=host).weight_bytes * percent // 100
    try:
        plan_paging(model, device, budget=wanted_bytes, host=host)
    except PagingError as error:
        return error.minimum_bytes
    return wanted_bytes


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def saved(model, path):
    """The file of a model as its user may have saved it: each name for itself."""
    state = model.state_dict()
    save_file({name: value.contiguous().clone() for name, value in state.items()}, path)
    return path


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


# --- from a disk


def outputs_of(model, args, kwargs):
    with torch.no_grad():
        return [home(model(*args, **kwargs)) for _ in range(3)]


@pytest.mark.parametrize("name", KINDS)
def test_on_the_cpu_a_model_computes_from_a_folder_as_from_memory(name, tmp_path):
    model, args, kwargs = build(name)
    (expected, *_), state = outputs_of(model, args, kwargs), copy.deepcopy(model.state_dict())
    with page(model, "cpu", budget=percent_of_weights(model, "cpu", 50, tmp_path), host=tmp_path):
        for output in outputs_of(model, args, kwargs):
            assert_equal(output, expected)
        assert_equal(model.state_dict(), state)
    assert_equal(outputs_of(model, args, kwargs)[0], expected)
    assert_equal(model.state_dict(), state)


@pytest.mark.parametrize("name", KINDS)
def test_on_a_device_a_model_without_values_computes_from_its_file(sim, name, tmp_path):
    model, args, kwargs = build(name)
    expected, activation_bytes = on_whole_device(sim, model, args, kwargs)
    path = saved(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        ours = ZOO[name][0]().eval()
    for module in ours.modules():
        for buffer in module._non_persistent_buffers_set:  # which no file holds
            setattr(module, buffer, torch.ones_like(getattr(module, buffer), device="cpu"))
    budget_bytes = percent_of_weights(model, sim.device, 50, path)
    sim()
    with load_paged(ours, path, sim.device, budget=budget_bytes) as handle:
        for output in outputs_of(ours, args, kwargs):
            assert_equal(output, expected)
        assert handle.report().host_bytes == 0
    assert sim.allocated_bytes == 0
    assert sim.peak_bytes <= budget_bytes + activation_bytes
    assert_equal(ours.state_dict(), model.state_dict())


# --- `chunk`: the first layers on the device, the rest on the host


@torch.no_grad()
@pytest.mark.parametrize("name", ["functional", "lstm", "nested", "resnet", "tied"])
def test_outputs_equal_the_plain_ones_and_are_on_the_device(sim, name):
    model, args, kwargs = build(name)
    expected = model(*args, **kwargs)
    state = copy.deepcopy(model.state_dict())
    n_parameters = sum(p.numel() for p in model.parameters())
    with chunk(model, sim.device, n_parameters // 2) as handle:
        assert sim.allocated_bytes == handle.plan.allocated_bytes < handle.plan.weight_bytes
        for _ in range(2):
            output = model(*args, **kwargs)
            assert all(x.device == sim.device for x in tree_leaves(output))
            torch.testing.assert_close(home(output), expected)
        there = on_device((args, kwargs), sim.device)
        torch.testing.assert_close(home(model(*there[0], **there[1])), expected)
        del output, there
    assert sim.requested_bytes == 0
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@torch.no_grad()
def test_layers_are_computed_where_their_weights_are_as_the_plan_says(sim):
    model, places = mlp()[:4].eval(), []
    for layer in model[::2]:
        layer.register_forward_hook(
            lambda module, args, output: places.append(
                (args[0].device.type, module.weight.device.type)
            )
        )
    with chunk(model, sim.device, 32 * 32 + 32) as handle:
        assert model(torch.randn(2, 32)).device == sim.device
        assert str(handle.plan) == (
            "Sequential on sim:0: 9.0 KiB in 2 units, within 4.5 KiB (at least 0 B)\n"
            "  stays   4.5 KiB in 1 unit\n"
            "  host    4.5 KiB in 1 unit, computed there\n"
            "  takes   4.5 KiB of sim:0, in 2.0 MiB that its allocator reserves\n"
            "    0     4.5 KiB  stays\n"
            "    2     4.5 KiB  host"
        )
    assert places == [("sim", "sim"), ("cpu", "cpu")]


def test_capacity_is_in_parameters_or_in_bytes(sim):
    for capacity, n_resident in ((1056, 1), (1055, 0), ("4.5KiB", 1), (10**9, 6)):
        with chunk(mlp(), sim.device, capacity) as handle:
            assert sum(unit.resident for unit in handle.plan.units) == n_resident
    for capacity in (-1, True):
        with pytest.raises(PagingError, match=r"^max_capacity=.*: write a number of parameters"):
            chunk(mlp(), sim.device, capacity)
    with pytest.raises(ByteSizeError, match="is not a number of bytes"):
        chunk(mlp(), sim.device, "many")
