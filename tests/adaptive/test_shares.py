"""Weights and counts of every type of number weigh as numbers do."""

import pytest
import torch
from torch import nn

from tenure.adaptive import step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool])
@pytest.mark.parametrize("n_terms", [1, 2])
def test_counts_of_few_bits_are_summed_in_more(dtype, n_terms):
    net = nn.Linear(2, 1).double()
    x = torch.randn(257, 2, dtype=torch.float64)
    per_sample = 1 if dtype is torch.bool else 255 if dtype is torch.uint8 else 2048

    def fn(b):
        count = torch.tensor(per_sample if len(b) > 1 else 1).to(dtype)
        terms = {"a": (net(b).sum(), count), "b": (net(b).sum(), len(b))}
        return terms if n_terms == 2 else terms["a"]

    result = step(fn, x, maximum=128)
    assert result.sizes == (128, 128, 1)
    wanted = net(x).detach().sum() / (2 * per_sample + 1)
    torch.testing.assert_close(result.terms["a" if n_terms == 2 else "loss"], wanted)
    wanted = 257 / (2 * per_sample + 1) + (n_terms == 2)
    torch.testing.assert_close(net.bias.grad, torch.tensor([wanted]).double())
