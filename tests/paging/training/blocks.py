"""Models for training: transformers, with and without checkpoints, and layers beside them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = self.before(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.drop(self.down(F.gelu(self.up(self.between(x)))))


class Checkpointed(nn.Module):
    """Computes each block anew in its backward pass."""

    def __init__(self, blocks, **options):
        super().__init__()
        self.blocks, self.options = blocks, options

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


def transformer(n_blocks=3):
    return nn.Sequential(*[Block() for _ in range(n_blocks)])


def mlp(n_layers=5):
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n_layers)]
    return nn.Sequential(*[each for both in layers for each in both])


LARGE = 128
"""So many samples that activations are worth a copy to the host."""


def inputs(sim, n_steps=5, n_samples=2):
    torch.manual_seed(1)
    return [torch.randn(n_samples, 5, WIDTH).to(sim.device) for _ in range(n_steps)]
