"""Random numbers are constant while a step is verified, and rounding is no difference."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import step

from ..step_cases import refused, samples, small_net

DRAWS = {
    "rand": torch.rand,
    "randint": lambda n: torch.randint(3, 9, (n,)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, dtype=torch.float64)),
    "normal of means and deviations": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.5)),
    "bernoulli_": lambda n: torch.empty(n).bernoulli_(0.3),
    "exponential_": lambda n: torch.empty(n).exponential_(2.0),
    "random_": lambda n: torch.empty(n, dtype=torch.int64).random_(4),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 4), 2)[:, 0],
    "multinomial again": lambda n: torch.multinomial(torch.ones(n, 4), 2, replacement=True)[:, 0],
    "poisson": lambda n: torch.poisson(torch.ones(n)),
    "gamma": lambda n: torch.distributions.Gamma(torch.ones(n), 1.0).sample(),
    "dropout": lambda n: F.dropout(torch.ones(n), 0.4),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n), 0.4, True),
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
    refused(lambda b: fn(b).sqrt(), x, maximum=9)


def entropy(net, batch):
    """In float32, as the losses of transformers are whatever the type of the model."""
    return F.cross_entropy(net(batch["x"]).float(), batch["y"])


ROUNDED = {
    "a loss that is wide again": (lambda net, batch: entropy(net, batch).double(), {}),
    "one of two terms": (
        lambda net, b: {"entropy": entropy(net, b), "norm": net(b["x"]).square().mean()},
        {},
    ),
    "what a root is taken of": (entropy, {"then": lambda value: value.double().sqrt()}),
    "outputs": (lambda net, batch: net(batch["x"]).float(), {"loss": lambda out: out.std()}),
}


@pytest.mark.parametrize("what", ROUNDED)
def test_a_loss_that_is_rounded_on_the_way_is_right_and_hides_no_mismatch(what):
    fn, options = ROUNDED[what]
    for seed in (1, 6, 7):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()
        batch = {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randint(5, (8,))}
        assert step(lambda b: fn(net, b), batch, maximum=3, **options).sizes == (3, 3, 2)  # noqa: B023
    if not options:
        batch["y"][:3] = -100
        refused(lambda b: fn(net, b), batch, maximum=3)
