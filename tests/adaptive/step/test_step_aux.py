"""What a function returns beside its loss: of the attempt that worked alone, in order."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, NoBatchsizeCache, step


def problem(n=10):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    return net, torch.randn(n, 4, dtype=torch.float64)


def test_it_comes_back_for_each_micro_batch():
    net, x = problem()
    seen = []

    def loss_of(x):
        out = net(x)
        seen.append(len(x))
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out.square().mean(), (len(x), out.detach())

    result = step(loss_of, x, cache_type=NoBatchsizeCache, has_aux=True)
    assert max(seen) == 10
    assert tuple(n for n, _ in result.aux) == result.sizes
    losses = [out.square().mean() * n / 10 for n, out in result.aux]
    torch.testing.assert_close(sum(losses), result.loss)


def test_of_a_batch_that_fits_there_is_one():
    net, x = problem()
    result = step(lambda x: (net(x).mean(), "told"), x, has_aux=True)
    assert result.aux == ("told",)
    assert step(lambda x: net(x).mean(), x).aux == ()


def test_two_passes_give_that_of_each_micro_batch_once():
    net, x = problem()
    result = step(lambda x: (net(x), x), x, loss=lambda out: out.std(), maximum=4, has_aux=True)
    assert torch.equal(torch.cat(result.aux), x)


def test_the_loss_is_that_of_a_function_without():
    net, x = problem(8)
    step(lambda x: (F.mse_loss(net.eval()(x), x[:, :1]), x), x, maximum=3, has_aux=True)
    split = net[0].weight.grad.clone()
    net.zero_grad()
    F.mse_loss(net(x), x[:, :1]).backward()
    torch.testing.assert_close(split, net[0].weight.grad, rtol=1e-10, atol=1e-12)


def test_what_is_no_pair_is_refused():
    net, x = problem()
    with pytest.raises(AdaptiveUsageError, match=r"has_aux=True was asked for\. Return a pair"):
        step(lambda x: net(x).mean(), x, has_aux=True)
