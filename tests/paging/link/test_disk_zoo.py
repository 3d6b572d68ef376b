"""Every kind of model computes the same from a disk, whether it was in memory or never was."""

import copy

import pytest
import torch

from tenure.paging import load_paged, page, plan_paging

from ..models import ZOO, build
from ..test_zoo import assert_equal, home, on_whole_device

save_file = pytest.importorskip("safetensors.torch").save_file


def budget_of(model, device, path):
    plan = plan_paging(model, device, host=path)
    return max(plan.minimum_bytes, plan.weight_bytes // 2)


def saved(model, path):
    """The file of a model as its user may have saved it: each name for itself."""
    state = model.state_dict()
    save_file({name: value.contiguous().clone() for name, value in state.items()}, path)
    return path


def empty(name):
    """The model without values, but for buffers that no file holds."""
    with torch.device("meta"):
        model = ZOO[name][0]().eval()
    for module in model.modules():
        for buffer in module._non_persistent_buffers_set:
            setattr(module, buffer, torch.ones_like(getattr(module, buffer), device="cpu"))
    return model


def outputs_of(model, args, kwargs):
    with torch.no_grad():
        return [home(model(*args, **kwargs)) for _ in range(3)]


KINDS = ["decoder", "functional", "half", "lstm", "resnet", "strided", "tied"]


@pytest.mark.parametrize("name", KINDS)
def test_on_the_cpu_a_model_computes_from_a_folder_as_from_memory(name, tmp_path):
    model, args, kwargs = build(name)
    (expected, *_), state = outputs_of(model, args, kwargs), copy.deepcopy(model.state_dict())
    with page(model, "cpu", budget=budget_of(model, "cpu", tmp_path), host=tmp_path):
        for output in outputs_of(model, args, kwargs):
            assert_equal(output, expected)
        assert_equal(model.state_dict(), state)
    assert_equal(outputs_of(model, args, kwargs)[0], expected)
    assert_equal(model.state_dict(), state)


@pytest.mark.parametrize("name", KINDS)
def test_on_a_device_a_model_without_values_computes_from_its_file(sim, name, tmp_path):
    model, args, kwargs = build(name)
    expected, activation_bytes = on_whole_device(sim, model, args, kwargs)
    path, ours = saved(model, tmp_path / "m.safetensors"), empty(name)
    budget_bytes = budget_of(model, sim.device, path)
    sim()
    with load_paged(ours, path, sim.device, budget=budget_bytes) as handle:
        for output in outputs_of(ours, args, kwargs):
            assert_equal(output, expected)
        assert handle.report().host_bytes == 0
    assert sim.allocated_bytes == 0
    assert sim.peak_bytes <= budget_bytes + activation_bytes
    assert_equal(ours.state_dict(), model.state_dict())
