"""What the demo trains: a character transformer, on real text that needs no download.

Weights and batches depend on the seed, and on nothing else.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tenure._errors import CommandError

from ._settings import Settings

# one part in ten, from the end, is never trained on
_VALIDATION_SHARE = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers.

    Attributes:
        n_files: files it was read from.
        vocabulary: its distinct characters in order; a token is an index into it.
        training: int64[n_training], the tokens to learn from.
        validation: int64[n_validation], the tokens that follow.
    """

    n_files: int
    vocabulary: str
    training: Tensor
    validation: Tensor


def read_corpus(n_characters: int) -> Corpus:
    """The first ``n_characters`` of the standard library, its modules in the order of their names.

    Raises:
        CommandError: this Python came without that much source.
    """
    texts = _read_sources(n_characters)
    text = "".join(texts)[:n_characters]
    vocabulary = "".join(sorted(set(text)))
    number_of = {character: number for number, character in enumerate(vocabulary)}
    tokens = torch.tensor([number_of[character] for character in text])
    n_training = len(text) - len(text) // _VALIDATION_SHARE
    return Corpus(len(texts), vocabulary, tokens[:n_training], tokens[n_training:])


def draw_windows(
    tokens: Tensor, n_windows: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Windows from random places of ``tokens``.

    Returns:
        int64[n_windows, length] characters, and int64[n_windows, length] what follows each of them.
    """
    starts = torch.randint(len(tokens) - length, (n_windows, 1), generator=generator)
    places = starts + torch.arange(length)
    return tokens[places], tokens[places + 1]


def _read_sources(n_characters: int) -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    missing = n_characters
    for path in sorted(folder.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8"))
        missing -= len(texts[-1])
        if missing <= 0:
            return texts
    raise CommandError(
        f"{folder} holds too little source to learn from ({missing:,} characters short). "
        "Use a Python that comes with the source of its standard library."
    )


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
        scores = self(tokens).flatten(0, 1)
        # of a paged model they are on the device, wherever the batch is
        return functional.cross_entropy(scores, following.flatten().to(scores.device))


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
