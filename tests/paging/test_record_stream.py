"""`record_stream()` keeps the bytes of a paged weight as it keeps those of any other tensor."""

import copy

import pytest
import torch

from tenure.paging import page
from tenure.testing import Rates

from .models import SumOnSideStream, by_the_weight

WIDTH = SumOnSideStream.WIDTH
N_BYTES = 4 * WIDTH * WIDTH


def by_a_view(weight, stream):
    weight.t()[3:].record_stream(stream)


def by_the_class(weight, stream):
    torch.Tensor.record_stream(weight, stream)


def whole(sim, model, x):
    twin = SumOnSideStream(*model.layers[0].module, *model.layers[0].side, model.layers[0].record)
    twin.load_state_dict(model.state_dict())
    return twin.to(sim.device)(x)


@pytest.mark.parametrize("record", [by_the_weight, by_a_view, by_the_class])
def test_a_weight_stays_until_the_stream_has_read_it(sim, record):
    sim(rates=Rates(flops_per_s=1e6))
    torch.manual_seed(0)
    model = SumOnSideStream(sim.module, sim.module.Stream(), record)
    x = torch.randn(4, WIDTH, device=sim.device)
    with torch.no_grad():
        expected = whole(sim, model, x).cpu()
        with page(model, sim.device, budget=3 * N_BYTES):
            for _ in range(3):
                assert torch.equal(model(x).cpu(), expected)
    assert not sim.take_faults()


def test_training_is_right_too(sim):
    sim(rates=Rates(flops_per_s=1e6))
    torch.manual_seed(0)
    model = SumOnSideStream(sim.module, sim.module.Stream(), by_the_weight)
    x = torch.randn(4, WIDTH, device=sim.device)
    plain = [copy.deepcopy(layer.weight) for layer in model.layers]
    sum(x.cpu() @ weight for weight in plain).square().sum().backward()
    with page(model, sim.device, budget=3 * N_BYTES, training=True):
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            for layer, weight in zip(model.layers, plain, strict=True):
                torch.testing.assert_close(layer.weight.grad, weight.grad)
    assert not sim.take_faults()


def test_without_it_the_race_is_told(sim):
    sim(rates=Rates(flops_per_s=1e6))
    model = SumOnSideStream(sim.module, sim.module.Stream(), lambda weight, stream: None)
    x = torch.randn(4, WIDTH, device=sim.device)
    with (
        torch.no_grad(),
        page(model, sim.device, budget=3 * N_BYTES),
        pytest.raises(RuntimeError, match="no wait orders the two"),
    ):
        model(x)
    assert sim.take_faults()
