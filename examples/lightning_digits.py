"""Digits in Lightning, in a third of the memory: one base class more, and the same network."""

import logging
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from tenure import adaptive
from tenure.integrations.lightning import AdaptiveMixin, MemoryCallback

# What Lightning tells of accelerators and workers is not what this is about.
warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric", "tenure.adaptive"):
    logging.getLogger(name).setLevel(logging.ERROR)

Batch = tuple[Tensor, Tensor]


class Digits(LightningModule):
    """A small convolutional network, as one writes it for a machine that is large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch, logged as always."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """In pieces that fit, each counted by the metric."""
        x, y = batch

        @adaptive.execute.chunked(x, collect=self.accuracy)
        def accuracy(rows: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
            return self.net(rows), y[start:end]

        self.log("accuracy", accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class AdaptiveDigits(AdaptiveMixin, Digits):
    """The same on a machine that is not."""


def train(kind: type[Digits], n_epochs: int, limit: int) -> tuple[Digits, dict[str, float], int]:
    """Train in so much memory; the module, what it logged, and the most that it held."""
    seed_everything(0)
    module, (x, y) = kind(), load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(x / 16).float().view(-1, 1, 8, 8), torch.tensor(y))
    loader = DataLoader(rows, batch_size=300)
    trainer = Trainer(
        max_epochs=n_epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[MemoryCallback()],
    )  # fmt: skip
    with adaptive.memory_budget(limit) as budget:
        trainer.fit(module, loader, loader)
    return module, {k: v.item() for k, v in trainer.callback_metrics.items()}, budget.peak_bytes


def main(n_epochs: int = 5) -> None:
    """Train both, and compare."""
    large, expected, peak = train(Digits, n_epochs, limit=2**33)
    adaptive.add_listener(print)
    small, found, held = train(AdaptiveDigits, n_epochs, limit=peak // 3)
    assert isinstance(small, AdaptiveDigits)
    assert small.adaptive_result is not None
    assert abs(found["loss"] - expected["loss"]) < 1e-4
    pairs = zip(large.parameters(), small.parameters(), strict=True)
    farthest = max((a - b).abs().max().item() for a, b in pairs)
    print(f"whole batches: {peak / 2**20:.1f} MiB, accuracy {expected['accuracy']:.3f}")
    print(f"in a third:    {held / 2**20:.1f} MiB, accuracy {found['accuracy']:.3f}")
    print(f"the last batch in micro-batches of {small.adaptive_result.sizes}")
    print(f"the parameters are at most {farthest:.0e} apart")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
