"""Generators of the user's own draw the same numbers again."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from tenure.adaptive import check_split, find_batch_size, predict_peak, step

KINDS = {
    "numpy": lambda: np.random.default_rng(0),
    "numpy of before": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
}
generator = None


def _draw(n):
    if isinstance(generator, torch.Generator):
        return torch.rand(n, generator=generator, dtype=torch.float64)
    if isinstance(generator, random.Random):
        return torch.tensor([generator.random() for _ in range(n)], dtype=torch.float64)
    return torch.from_numpy(generator.random_sample(n) if _is_old() else generator.random(n))


def _is_old():
    return isinstance(generator, np.random.RandomState)


class Encoder(nn.Module):
    """Masks at random, by a generator that only its file names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4).double()

    def forward(self, x):
        return self.linear(x * _draw(len(x))[:, None])


def _contrast(out):
    out = nn.functional.normalize(out, dim=1)
    return nn.functional.cross_entropy(out @ out.T / 0.1, torch.arange(len(out)))


@pytest.fixture(params=KINDS)
def encoder(request):
    global generator
    torch.manual_seed(0)
    generator = KINDS[request.param]()
    yield Encoder()
    generator = None


@pytest.mark.parametrize("where", ["global", "attribute", "captured"])
def test_both_passes_of_a_loss_of_outputs_draw_the_same(encoder, request, where):
    global generator
    make = KINDS[request.node.callspec.params["encoder"]]
    captured = make()

    def forward(x):
        global generator
        # as if the code named it there, and nowhere else
        generator = {"global": generator, "attribute": encoder.random, "captured": captured}[where]
        return encoder(x)

    encoder.random = make()
    x = torch.randn(30, 8, dtype=torch.float64)
    _contrast(torch.cat([forward(part) for part in x.split(10)])).backward()
    expected, after = encoder.linear.weight.grad.clone(), _draw(3)
    encoder.zero_grad()
    generator, captured, encoder.random = make(), make(), make()
    step(forward, x, loss=_contrast, maximum=10)
    torch.testing.assert_close(encoder.linear.weight.grad, expected)
    assert torch.equal(_draw(3), after)


@pytest.mark.parametrize(
    "ask",
    [
        lambda net, x: check_split(lambda b: net(b).sum(1).mean(), x),
        lambda net, x: find_batch_size(lambda n: net(x[:n]).sum().backward(), high=4),
        lambda net, x: predict_peak(net, x),
    ],
)
def test_a_question_leaves_the_generator_as_it_was(encoder, request, ask):
    global generator
    expected = _draw(3)
    generator = KINDS[request.node.callspec.params["encoder"]]()
    # NumPy's numbers have no fakes
    if ask.__code__.co_names[0] != "predict_peak" or isinstance(generator, torch.Generator):
        ask(encoder, torch.randn(8, 8, dtype=torch.float64))
    assert torch.equal(_draw(3), expected)
