"""Random numbers are constant while a step is verified, and rounding is no difference."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import SplitMismatchError, step

from ..step_cases import samples, small_net

DRAWS = {
    "rand": torch.rand,
    "randn": torch.randn,
    "randint": lambda n: torch.randint(5, (n,)),
    "randint between": lambda n: torch.randint(3, 9, (n,)),
    "rand_like": lambda n: torch.rand_like(torch.ones(n)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, dtype=torch.float64)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n), 7),
    "normal": lambda n: torch.normal(torch.zeros(n), 1.0),
    "normal of means and deviations": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "normal of a size": lambda n: torch.normal(0.0, 2.0, (n,)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.5)),
    "bernoulli_": lambda n: torch.empty(n).bernoulli_(0.3),
    "normal_": lambda n: torch.empty(n).normal_(),
    "log_normal_": lambda n: torch.empty(n).log_normal_(),
    "uniform_": lambda n: torch.empty(n).uniform_(-1, 1),
    "exponential_": lambda n: torch.empty(n).exponential_(2.0),
    "cauchy_": lambda n: torch.empty(n).cauchy_(),
    "geometric_": lambda n: torch.empty(n).geometric_(0.5),
    "random_": lambda n: torch.empty(n, dtype=torch.int64).random_(4),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 4), 2)[:, 0],
    "multinomial again": lambda n: torch.multinomial(torch.ones(n, 4), 2, replacement=True)[:, 0],
    "poisson": lambda n: torch.poisson(torch.ones(n)),
    "dropout": lambda n: F.dropout(torch.ones(n), 0.4),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n), 0.4, True),
    "one number for all": lambda n: torch.rand(()).expand(n),
    "a generator's": lambda n: torch.rand(n, generator=torch.Generator()),
    # torch's own is not known to be constant: samples are exchanged
    "binomial": lambda n: torch.binomial(torch.full((n,), 4.0), torch.full((n,), 0.5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_are_drawn_for_each_sample_hide_no_root_and_are_no_difference(name):
    net = small_net()

    def fn(b):
        # another one draws after it
        factor = 1 + DRAWS[name](len(b)).double() + torch.rand(len(b)).double()
        return (net(b) * factor[:, None]).square().mean()

    x = samples(40)
    assert len(step(fn, x, maximum=9).sizes) == 5
    with pytest.raises(SplitMismatchError):
        step(lambda b: fn(b).sqrt(), x, maximum=9)


@pytest.mark.parametrize(("rate", "n_runs"), [(0.0, 9), (0.5, 12)])
def test_micro_batches_that_drew_nothing_need_not_run_again(rate, n_runs):
    net, ran = small_net(), []

    def fn(b):
        ran.append(len(b))
        x = net(b)[:, None]
        return F.scaled_dot_product_attention(x, x, x, dropout_p=rate).square().mean()

    step(fn, samples(12), maximum=4)
    assert len(ran) == n_runs


def _in_float64(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    return net, {"x": x, "y": torch.randint(5, (8,))}


def _entropy(net, batch):
    """In float32, as the losses of transformers are whatever the type of the model."""
    return F.cross_entropy(net(batch["x"]).float(), batch["y"])


_ROUNDED = {
    "the loss": (_entropy, {}),
    "a loss that is wide again": (lambda net, batch: _entropy(net, batch).double(), {}),
    "one of two terms": (
        lambda net, b: {"entropy": _entropy(net, b), "norm": net(b["x"]).square().mean()},
        {},
    ),
    "what a root is taken of": (_entropy, {"then": lambda value: value.double().sqrt()}),
    "outputs": (lambda net, batch: net(batch["x"]).float(), {"loss": lambda out: out.std()}),
}


@pytest.mark.parametrize("seed", [1, 6, 7])
@pytest.mark.parametrize("what", _ROUNDED)
def test_a_loss_that_is_rounded_on_the_way_is_right(what, seed):
    fn, options = _ROUNDED[what]
    net, batch = _in_float64(seed)
    assert step(lambda b: fn(net, b), batch, maximum=3, **options).sizes == (3, 3, 2)


@pytest.mark.parametrize("what", ["the loss", "a loss that is wide again", "one of two terms"])
def test_a_loss_that_is_rounded_on_the_way_hides_no_mismatch(what):
    fn, _ = _ROUNDED[what]
    net, batch = _in_float64(1)
    batch["y"][:3] = -100
    with pytest.raises(SplitMismatchError, match="would give other results then"):
        step(lambda b: fn(net, b), batch, maximum=3)
