"""Models for training: a transformer, with and without checkpoints."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 32
N_BLOCKS = 6


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

    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(N_BLOCKS)])
        self.options = options

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


def transformer():
    return nn.Sequential(*[Block() for _ in range(N_BLOCKS)])


LARGE = 128
"""So many samples that activations are worth a copy to the host."""


def inputs(sim, n_steps=5, n_samples=2):
    torch.manual_seed(1)
    return [torch.randn(n_samples, 5, WIDTH).to(sim.device) for _ in range(n_steps)]
