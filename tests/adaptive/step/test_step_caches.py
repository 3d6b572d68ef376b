"""What a model caches while it is only asked about is no disposed tensor afterwards."""

import functools
import sys
from types import ModuleType

import pytest
import torch

from tenure.adaptive import (
    NoBatchsizeCache,
    check_split,
    find_batch_size,
    memory_budget,
    step,
)

SOURCE = """
import functools, torch
from torch import nn

MASKS = {}

def in_dict(n):
    if n not in MASKS:
        MASKS[n] = torch.ones(n, n).tril()
    return MASKS[n]

@functools.lru_cache
def remembered(n):
    return torch.ones(n, n).tril()

class Net(nn.Module):
    table = None

    def __init__(self, mask):
        super().__init__()
        self.linear, self.mask = nn.Linear(8, 8), mask or Net.on_class

    def forward(self, x):
        return self.linear(x) @ self.mask(8)

    @staticmethod
    def on_class(n):
        if Net.table is None:
            Net.table = torch.ones(n, n).tril()
        return Net.table
"""


@pytest.fixture(params=["in_dict", "remembered", "on_class"])
def net(request):
    code = ModuleType("code_that_caches_masks")
    sys.modules[code.__name__] = code
    exec(SOURCE, vars(code))
    yield code.Net(vars(code).get(request.param))
    del sys.modules[code.__name__]


def _loss(net, x):
    return net(x).square().mean()


def test_the_model_trains_after_check_split(net):
    x = torch.randn(40, 8)
    assert check_split(lambda b: _loss(net, b), x).ok
    _loss(net, x).backward()


def test_the_model_trains_after_and_while_a_batch_size_is_found(net):
    x = torch.randn(40, 8)
    n = find_batch_size(lambda n: _loss(net, x[:n]).backward(), high=40, budget="100KiB")
    assert n == 40
    _loss(net, x).backward()


def test_the_model_trains_after_trials_of_a_step(net):
    x = torch.randn(4000, 8)
    with memory_budget("100KiB"):
        result = step(functools.partial(_loss, net), x, cache_type=NoBatchsizeCache)
    assert result.attempts > 1
    _loss(net, x).backward()
