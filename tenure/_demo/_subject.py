"""What the demo trains: a network that reads PyTorch's own source, without a download."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
_WINDOW = 32


class Training:
    """A network, its optimizer and its batches, the same each time.

    Args:
        quick: make them smaller.
    """

    def __init__(self, *, quick: bool) -> None:
        width, self.n_windows = (128, 1024) if quick else (256, 2048)
        text = inspect.getsource(functional)[:50_000]
        characters = sorted(set(text))
        number_of = {character: number for number, character in enumerate(characters)}
        self.tokens = torch.tensor([number_of[character] for character in text])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
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
        self.random = torch.Generator().manual_seed(0)

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
