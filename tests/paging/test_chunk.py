"""`chunk`: the first layers on the device, the rest on the host, and nothing else changes."""

import copy

import pytest
import torch
from torch import nn

from tenure import ByteSizeError
from tenure.paging import PagingError, chunk

from .models import build, mlp
from .test_zoo import home, on_device

pytestmark = pytest.mark.usefixtures("without_gradients")


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
            torch.testing.assert_close(home(output), expected)
        there = on_device((args, kwargs), sim.device)
        torch.testing.assert_close(home(model(*there[0], **there[1])), expected)
        del output
    assert sim.requested_bytes == sum(x.nbytes for x in _tensors(there))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def _tensors(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def test_layers_are_computed_where_their_weights_are(sim):
    model, places = mlp().eval(), []
    for layer in model[::2]:
        layer.register_forward_hook(
            lambda module, args, output: places.append(
                (args[0].device.type, module.weight.device.type)
            )
        )
    with chunk(model, sim.device, 3 * (32 * 32 + 32)) as handle:
        assert model(torch.randn(2, 32)).device == sim.device
        assert [unit.resident for unit in handle.plan.units] == 3 * [True] + 3 * [False]
    assert places == 3 * [("sim", "sim")] + 3 * [("cpu", "cpu")]


def test_capacity_is_in_parameters_or_in_bytes(sim):
    for capacity, n_resident in ((1056, 1), (1055, 0), ("4.5KiB", 1), (10**9, 6)):
        with chunk(mlp(), sim.device, capacity) as handle:
            assert sum(unit.resident for unit in handle.plan.units) == n_resident


def test_the_plan_says_what_is_computed_where(sim):
    with chunk(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), sim.device, 72) as handle:
        assert str(handle.plan) == (
            "Sequential on sim:0: 1.0 KiB in 2 units, within 512 B (at least 0 B)\n"
            "  stays   512 B in 1 unit\n"
            "  host    512 B in 1 unit, computed there\n"
            "  takes   512 B of sim:0, in 2.0 MiB that its allocator reserves\n"
            "    0       512 B  stays\n"
            "    1       512 B  host"
        )


def test_what_is_no_capacity_is_refused(sim):
    for capacity in (-1, True):
        with pytest.raises(PagingError, match=r"^max_capacity=.*: write a number of parameters"):
            chunk(mlp(), sim.device, capacity)
    with pytest.raises(ByteSizeError, match="is not a number of bytes"):
        chunk(mlp(), sim.device, "many")
