"""Tensors that are not paged, above all those that are made of others, as quantized ones are."""

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tenure.paging import page

from ..forward.test_modes import Operations
from ..models import WIDTH, mlp

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = mlp().eval()
    twin = TwoTensor(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH))
    model[2].weight = nn.Parameter(twin, requires_grad=False)
    model[2].weight.note = "kept"
    return model


def assert_same(found, expected):
    for name in "ab":
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name))


def test_a_tensor_that_is_made_of_others_is_on_the_device_with_all_of_them(sim, model, x):
    seen, expected = [], model(x)
    model[2].register_forward_hook(lambda module, *_: seen.append(module.weight))
    with page(model, sim.device, budget="24KiB") as handle:
        for _ in range(2):
            assert_same(model(x), expected)
        assert handle.report().resident_bytes == handle.plan.resident_bytes >= 8 * WIDTH * WIDTH
        assert {each.device.type for weight in seen for each in (weight.a, weight.b)} == {"sim"}
        assert {(type(each), each.note) for each in seen} == {(TwoTensor, "kept")}
        seen.clear()
    assert model[2].weight.a.device.type == "cpu"
    assert_same(model(x), expected)


def test_a_tensor_that_is_made_of_others_counts_anew_when_it_was_written(tmp_path, model, x):
    twin = copy.deepcopy(model)
    with page(model, "cpu", budget="24KiB", host=tmp_path):
        for _ in range(2):
            assert_same(model(x), twin(x))
            for each in (model, twin):
                each[2].weight.mul_(2)
    assert_same(model(x), twin(x))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", TwoTensor(torch.zeros(3), torch.ones(3)))

    def forward(self, x):
        self.count.add_(1)
        return x


def test_what_a_forward_writes_to_one_is_home_after_it(tmp_path, model, x):
    model.insert(5, Counting())
    with page(model, "cpu", budget="24KiB", host=tmp_path):
        for _ in range(2):
            model(x)
        assert (model[5].count.a.tolist(), model[5].count.b.tolist()) == ([2] * 3, [3] * 3)


def test_a_dispatch_mode_sees_nothing_of_its_copies(tmp_path, model, x):
    twin, seeing = copy.deepcopy(model), [Operations(), Operations()]
    with page(model, "cpu", budget="24KiB", host=tmp_path):
        model[2].weight.mul_(1)  # so that it is copied anew
        for each, mode in zip((model, twin), seeing, strict=True):
            with mode:
                each(x)
    assert seeing[0].seen == seeing[1].seen
