"""What the demo trains: a network that reads Python's own standard library, without a download."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tenure._errors import CommandError

Batch = tuple[Tensor, Tensor]
_WINDOW = 32


class Training:
    """A network, its optimizer and its batches, which depend on the seed alone.

    Args:
        quick: make them smaller.
        seed: of the weights and of the batches.
    """

    def __init__(self, *, quick: bool, seed: int) -> None:
        width, self.n_windows = (128, 1024) if quick else (256, 2048)
        text = read_source(50_000)
        characters = sorted(set(text))
        number_of = {character: number for number, character in enumerate(characters)}
        self.tokens = torch.tensor([number_of[character] for character in text])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Embedding(len(characters), 16),
                nn.Flatten(),
                nn.Linear(16 * _WINDOW, width),
                nn.GELU(),
                nn.Linear(width, width),
                nn.GELU(),
                nn.Linear(width, width),
                nn.GELU(),
                nn.Linear(width, len(characters)),
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.random = torch.Generator().manual_seed(seed)

    def batches(self, n: int) -> Iterator[Batch]:
        """Windows, int64[n_windows, 32], each batch with the characters that follow them."""
        for _ in range(n):
            yield self._draw(self.n_windows)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a batch, float32[]."""
        windows, following = batch
        return functional.cross_entropy(self.model(windows), following)

    def validate(self) -> Tensor:
        """Return the loss of a smaller batch, with the graph of its forward pass."""
        return self.loss(self._draw(self.n_windows // 4))

    def _draw(self, n_windows: int) -> Batch:
        most = len(self.tokens) - _WINDOW
        starts = torch.randint(most, (n_windows, 1), generator=self.random)
        return self.tokens[starts + torch.arange(_WINDOW)], self.tokens[starts[:, 0] + _WINDOW]


def read_source(n_characters: int) -> str:
    """Return the first characters of the standard library, its modules in the order of their names.

    Raises:
        CommandError: this Python came without that much source.
    """
    folder, text = Path(sysconfig.get_path("stdlib")), ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8")
        if len(text) >= n_characters:
            return text[:n_characters]
    missing = n_characters - len(text)
    raise CommandError(
        f"{folder} holds too little source to learn from ({missing:,} characters short). "
        "Use a Python that comes with the source of its standard library."
    )
