"""Kinds of networks in float32: the prediction is not too low, and within two percent."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import predict_peak
from tests.true_peak import step_of, true_peak_bytes

pytestmark = pytest.mark.slow


class Tied(nn.Module):
    """A language model whose head is its embedding, and which recomputes its layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 96)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(96, 4, 192, batch_first=True) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.linear(x, self.embed.weight)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.low = self.block(3, 16), self.block(16, 32)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), self.block(32, 4)

    @staticmethod
    def block(n_in, n_out):
        layers = nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(True)
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.first(x)
        below = self.low(F.max_pool2d(x, 2))
        return self.last(torch.cat([x, self.up(below)], 1))


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(32, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.cell(x)[0])


class Physics(nn.Module):
    """Two derivatives of a network are its output: the backward pass is one of a third."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return second


def reals(*shape):
    return lambda: torch.randn(shape)


def words(*shape):
    return lambda: torch.randint(500, shape)


_ARCHITECTURES = {
    "u-net": (UNet, reals(8, 3, 32, 32)),
    "gru": (lambda: Recurrent(nn.GRU), reals(32, 20, 32)),
    "tied": (Tied, words(16, 32)),
    "physics": (Physics, reals(512, 2)),
}


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_a_prediction_is_not_too_low_and_within_two_percent(name):
    make, batch_of = _ARCHITECTURES[name]
    torch.manual_seed(0)
    model, batch = make(), batch_of()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(batch):
        return model(batch).square().mean()

    predicted = predict_peak(loss, batch, optimizer=optimizer)
    true_bytes = predicted.baseline_bytes + true_peak_bytes(step_of(loss, batch, optimizer))

    assert true_bytes <= predicted.peak_bytes <= 1.02 * true_bytes
