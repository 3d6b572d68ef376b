"""No tensor without data outlives a prediction in a cache that training would take it from."""

import gc
import sys
from importlib import import_module

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tenure import DisposedTensorError
from tenure.adaptive import PredictionError, memory_budget, plan, predict_peak, step


@pytest.fixture
def masks():
    """The module, made anew: what was there before the tests is hidden from searches."""
    name = f"{__package__}.masks"
    sys.modules.pop(name, None)
    return import_module(name)


def _n_fakes():
    return sum(type(each) is FakeTensor for each in gc.get_objects())


def predicted_step(fn, batch):
    return step(fn, batch, predict=True)


def planned(fn, batch):
    return plan(fn, batch, "1MiB")


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("cached", predict_peak),
        ("in_dict", predict_peak),
        ("in_global", predict_peak),
        ("on_object", predict_peak),
        ("in_closure", predict_peak),
        ("cached", planned),
        ("cached", predicted_step),
    ],
)
def test_a_cache_that_a_prediction_filled_holds_no_fakes(masks, name, ask):
    net, batch, before = masks.Net(vars(masks)[name]), torch.ones(8, 4), _n_fakes()
    with memory_budget("1MiB"):
        ask(lambda x: net(x).square().mean(), batch)
    assert _n_fakes() == before
    net(batch).sum().backward()
    assert type(net.linear.weight.grad) is torch.Tensor


def test_a_prediction_that_fails_leaves_no_fakes_either(masks):
    net, before = masks.Net(masks.in_global), _n_fakes()
    with pytest.raises(ZeroDivisionError):
        predict_peak(lambda x: net(x).sum() / (1 // 0), torch.ones(8, 4))
    assert masks.MASK is None
    assert _n_fakes() == before


def test_a_hook_that_keeps_what_it_sees_keeps_no_fakes():
    net, seen = nn.Linear(4, 4), []
    net.register_forward_hook(lambda module, args, output: seen.append(output))
    net.weight.register_hook(seen.append)
    predict_peak(net, torch.ones(8, 4))
    assert not seen


@pytest.mark.parametrize("ask", [predict_peak, predicted_step])
def test_a_holder_that_nobody_knows_is_named_before_anything_trains(masks, ask):
    net, batch = masks.Net(masks.of_thread), torch.ones(8, 4)
    found = r"mask'\], which now holds a tensor without data \(float32\[4, 4\]"
    with pytest.raises(PredictionError, match=found), memory_budget("1MiB"):
        ask(lambda x: net(x).mean(), batch)
    assert net.linear.weight.grad is None
    with pytest.raises(DisposedTensorError):
        net(batch)
    del masks.SPACE.mask
    net(batch).sum().backward()
    assert type(net.linear.weight.grad) is torch.Tensor
