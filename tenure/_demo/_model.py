"""A character transformer, small enough for two CPU cores."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._settings import Settings


class CharTransformer(nn.Module):
    """Predicts the next character of each prefix of a window."""

    def __init__(self, n_characters: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.characters = nn.Embedding(n_characters, width)
        self.places = nn.Embedding(settings.window, width)
        self.blocks = nn.Sequential(
            *(_Block(width, settings.heads) for _ in range(settings.layers))
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, n_characters))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next character.

        Args:
            tokens: int64[n_windows, length].

        Returns:
            float32[n_windows, length, n_characters].
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.blocks(self.characters(tokens) + self.places(places)))
        return logits

    def loss(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The mean cross entropy in nats per character, float32[].

        Args:
            tokens: int64[n_windows, length].
            following: int64[n_windows, length], the character after each of them.
        """
        return functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())


class _Block(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention = _Attention(width, n_heads)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        fed: Tensor = self.feed_forward(x)
        return x + fed


class _Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm(x)).unflatten(2, (3, self.n_heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


def make_model(n_characters: int, settings: Settings) -> CharTransformer:
    """The model with weights that depend on the seed alone; the global generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return CharTransformer(n_characters, settings)
