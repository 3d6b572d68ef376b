"""No tensor without data outlives a prediction in a cache that training would take it from."""

import gc
import sys
import threading
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tenure import DisposedTensorError
from tenure.adaptive import PredictionError, memory_budget, plan, predict_peak, step

SOURCE = """
import functools, torch
from torch import nn

CACHE = {}
MASK = None

@functools.lru_cache
def pair(n):
    return torch.ones(n, n), "beside"

def cached(n):
    return pair(n)[0]

def in_dict(n):
    return CACHE.setdefault(n, {"mask": torch.ones(n, n)})["mask"]

def in_global(n):
    global MASK
    if MASK is None:
        MASK = torch.ones(n, n)
    return MASK

class Table:
    rows = None

TABLE = Table()

def on_object(n):
    if TABLE.rows is None:
        TABLE.rows = torch.ones(n, n)
    return TABLE.rows

def _closure():
    mask = None
    def get(n):
        nonlocal mask
        mask = torch.ones(n, n) if mask is None else mask
        return mask
    return get

in_closure = _closure()

class Net(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), mask

    def forward(self, x):
        return self.linear(x) @ self.mask(4)
"""
"""A module of Python with a model, and functions that make a mask once and keep it somewhere."""


@pytest.fixture
def code():
    """The module, made anew: what was there before the tests is hidden from searches."""
    module = ModuleType("code_that_keeps_masks")
    sys.modules[module.__name__] = module
    exec(SOURCE, vars(module))
    yield module
    del sys.modules[module.__name__]


def _n_fakes():
    return sum(type(each) is FakeTensor for each in gc.get_objects())


@pytest.mark.parametrize("name", ["cached", "in_dict", "in_global", "on_object", "in_closure"])
def test_a_cache_that_a_prediction_filled_holds_no_fakes(code, name):
    net, batch = code.Net(vars(code)[name]), torch.ones(8, 4)
    before = _n_fakes()
    predict_peak(lambda x: net(x).square().mean(), batch)
    assert _n_fakes() == before
    net(batch).sum().backward()
    assert type(net.linear.weight.grad) is torch.Tensor


@pytest.mark.parametrize(
    "ask",
    [
        lambda fn, batch: plan(fn, batch, "1MiB"),
        lambda fn, batch: step(fn, batch, predict=True),
    ],
)
def test_a_step_trains_with_real_tensors_after_it_was_predicted(code, ask):
    net = code.Net(code.cached)
    with memory_budget("1MiB"):
        ask(lambda x: net(x).square().mean(), torch.ones(8, 4))
    net(torch.ones(8, 4)).sum().backward()
    assert type(net.linear.weight.grad) is torch.Tensor


def test_a_prediction_that_fails_leaves_no_fakes_either(code):
    net, before = code.Net(code.in_global), _n_fakes()
    with pytest.raises(ZeroDivisionError):
        predict_peak(lambda x: net(x).sum() / (1 // 0), torch.ones(8, 4))
    assert code.MASK is None
    assert _n_fakes() == before


def test_a_hook_that_keeps_what_it_sees_keeps_no_fakes():
    net, seen = nn.Linear(4, 4), []
    net.register_forward_hook(lambda module, args, output: seen.append(output))
    net.weight.register_hook(seen.append)
    predict_peak(net, torch.ones(8, 4))
    assert not seen


@pytest.mark.parametrize("ask", [predict_peak, lambda fn, batch: step(fn, batch, predict=True)])
def test_a_holder_that_nobody_knows_is_named_before_anything_trains(code, ask):
    code.space = threading.local()
    exec("def keep(n): return space.__dict__.setdefault('mask', torch.ones(n, n))", vars(code))
    net, batch = code.Net(code.keep), torch.ones(8, 4)
    found = r"mask'\], which now holds a tensor without data \(float32\[4, 4\]"
    with pytest.raises(PredictionError, match=found), memory_budget("1MiB"):
        ask(lambda x: net(x).mean(), batch)
    assert net.linear.weight.grad is None
    with pytest.raises(DisposedTensorError):
        net(batch)
    del code.space.mask
    net(batch).sum().backward()
    assert type(net.linear.weight.grad) is torch.Tensor
