"""Every kind of model computes the same paged as on the device whole, within any budget."""

import copy
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tenure import ByteSizeError
from tenure.paging import PagingError, chunk, load_paged, page

from .models import ZOO, build, linears, mlp
from .support import assert_equal, home, on_device, on_meta, percent_of_weights, saved

KINDS = ["decoder", "functional", "half", "lstm", "resnet", "strided", "tied"]


def outputs_of(model, args, kwargs):
    with torch.no_grad():
        return [home(model(*args, **kwargs)) for _ in range(3)]


def on_whole_device(sim, model, args, kwargs):
    """The output of a copy that is on the device whole, and the most that all else took there."""
    whole = copy.deepcopy(model).to(sim.device)
    sim.reset_peak()
    before_bytes = sim.allocated_bytes
    args, kwargs = on_device((args, kwargs), sim.device)
    with torch.no_grad():
        output = whole(*args, **kwargs)
    return home(output), sim.peak_bytes - before_bytes


def objects_of(model):
    """Its parameters, of which tied ones are one."""
    return [*map(id, model.parameters())]


@pytest.mark.parametrize(
    ("name", "percent", "has_file"),
    [
        *((name, percent, False) for name in ZOO for percent in (25, 75)),
        *((name, 50, True) for name in KINDS),
    ],
)
def test_outputs_equal_those_of_the_whole_model_and_the_peak_stays_below_the_budget(
    sim, name, percent, has_file, tmp_path
):
    model, *call = build(name)
    expected, activation_bytes = on_whole_device(sim, model, *call)
    state, host = copy.deepcopy(model.state_dict()), "pinned"
    paging = partial(page, model, sim.device)
    if has_file:
        host = saved(model, tmp_path / "m.safetensors")
        model = on_meta(ZOO[name][0]).eval()
        for module in model.modules():
            for buffer in module._non_persistent_buffers_set:  # which no file holds
                setattr(module, buffer, torch.ones_like(getattr(module, buffer), device="cpu"))
        paging = partial(load_paged, model, host, sim.device)
    before = objects_of(model)

    def check(budget_bytes):
        sim()
        with paging(budget=budget_bytes) as handle:
            inside = objects_of(model)
            assert has_file or inside == before
            assert sim.allocated_bytes <= handle.plan.allocated_bytes <= handle.plan.budget_bytes
            for output in outputs_of(model, *call):
                assert_equal(output, expected)
            assert objects_of(model) == inside
            assert handle.report().host_bytes == 0 or not has_file
        assert objects_of(model) == inside
        assert sim.allocated_bytes == 0
        assert sim.peak_bytes <= budget_bytes + activation_bytes

    try:
        check(percent_of_weights(build(name)[0], sim.device, percent, host))
    except PagingError as error:  # which weights a forward holds at once, only running it tells
        assert name == "functional"
        check(error.minimum_bytes)
    assert_equal(model.state_dict(), state)


@pytest.mark.parametrize("name", KINDS)
def test_on_the_cpu_a_model_computes_from_a_folder_as_from_memory(name, tmp_path):
    model, *call = build(name)
    (expected, *_), state = outputs_of(model, *call), copy.deepcopy(model.state_dict())
    with page(model, "cpu", budget=percent_of_weights(model, "cpu", 50, tmp_path), host=tmp_path):
        for output in outputs_of(model, *call):
            assert_equal(output, expected)
        assert_equal(model.state_dict(), state)
    assert_equal(outputs_of(model, *call)[0], expected)
    assert_equal(model.state_dict(), state)


@torch.no_grad()
@pytest.mark.parametrize("name", ["functional", "lstm", "nested", "resnet", "tied"])
def test_outputs_in_chunks_equal_the_plain_ones_and_are_on_the_device(sim, name):
    model, args, kwargs = build(name)
    expected = model(*args, **kwargs)
    state = copy.deepcopy(model.state_dict())
    n_parameters = sum(p.numel() for p in model.parameters())
    with chunk(model, sim.device, n_parameters // 2) as handle:
        assert sim.allocated_bytes == handle.plan.allocated_bytes < handle.plan.weight_bytes
        for device in ("cpu", "cpu", sim.device):
            given, by_name = on_device((args, kwargs), device)
            output = model(*given, **by_name)
            assert all(x.device == sim.device for x in tree_leaves(output))
            torch.testing.assert_close(home(output), expected)
        del output, given, by_name
    assert sim.requested_bytes == 0
    assert_equal(model.state_dict(), state)


@torch.no_grad()
def test_layers_are_computed_where_their_weights_are_as_the_plan_says(sim):
    model, places = linears(2), []

    def look(module, args, output):
        places.append((args[0].device.type, module.weight.device.type))

    for layer in model:
        layer.register_forward_hook(look)
    with chunk(model, sim.device, 32 * 32 + 32) as handle:
        assert model(torch.randn(2, 32)).device == sim.device
        assert str(handle.plan) == (
            "Sequential on sim:0: 9.0 KiB in 2 units, within 4.5 KiB (at least 0 B)\n"
            "  stays   4.5 KiB in 1 unit\n"
            "  host    4.5 KiB in 1 unit, computed there\n"
            "  takes   4.5 KiB of sim:0, in 2.0 MiB that its allocator reserves\n"
            "    0     4.5 KiB  stays\n"
            "    1     4.5 KiB  host"
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
