"""Networks whose steps are predicted."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.checkpointed = checkpointed

    def block(self, layer, x):
        return x + torch.tanh(layer(x)) * torch.sigmoid(x)

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(self.block, layer, x, use_reentrant=False)
            else:
                x = self.block(layer, x)
        return x


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh())


def wide():
    """Its parameters are much, its activations are little: the peak is the optimizer's."""
    return nn.Sequential(*(nn.Linear(700, 700) for _ in range(8)))


def layer():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


def transformer():
    return nn.TransformerEncoder(layer(), 2)


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
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 8)

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
