"""The programs that the chapters run, and whose source they show: as short as a user writes them.

What is shown is the body of each function, as it stands here. It fits 76 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tenure import DisposeScope, NewDisposeScope
from tenure.adaptive import StepResult, step
from tenure.paging import PagingPlan, PagingReport, page

from ._settings import Settings
from ._subject import CharTransformer, Corpus, draw_windows, make_model

Batch = tuple[Tensor, Tensor]
OpenScope = Callable[[], AbstractContextManager[DisposeScope | None]]


@dataclass(slots=True)
class Training:
    """A model, its optimizer and its batches: the same ones each time, for one seed."""

    corpus: Corpus
    settings: Settings
    model: CharTransformer = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.model = make_model(len(self.corpus.vocabulary), self.settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.learning_rate)
        self.random = torch.Generator().manual_seed(self.settings.seed)

    def batches(self, n_steps: int) -> Iterator[Batch]:
        """What to learn from."""
        for _ in range(n_steps):
            yield self._draw(self.corpus.training, self.settings.batch)

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        return self.model.loss(*batch)

    def validate(self) -> Tensor:
        """The loss of text that is never trained on, with the graph of its forward pass."""
        return self.loss(self._draw(self.corpus.validation, self.settings.validation_batch))

    def _draw(self, tokens: Tensor, n_windows: int) -> Batch:
        return draw_windows(tokens, n_windows, self.settings.window, self.random)


def train(
    run: Training, n_steps: int, open_scope: OpenScope, after_step: Callable[[float], None]
) -> list[Tensor]:
    """Train, with a leak in the loop: the list keeps each validation loss and its graph."""
    history = []
    for batch in run.batches(n_steps):
        with open_scope():
            loss = run.loss(batch)
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
            history.append(run.validate())  # validate().item() was meant
            value = loss.item()
        after_step(value)
    return history


def open_reporting(scopes: list[DisposeScope]) -> DisposeScope:
    """A scope that lets nothing go, and tells what outlives it."""
    scope = NewDisposeScope(f"step {len(scopes) + 1}", policy="report")
    scopes.append(scope)
    return scope


def train_plain(run: Training, batch: Batch) -> float:
    """Forward and backward, as everybody writes them."""
    loss = run.loss(batch)
    loss.backward()
    return loss.item()


def train_with_retry(run: Training, batch: Batch) -> float:
    """What everybody writes next: the error still holds the frames, and so the memory."""
    try:
        return train_plain(run, batch)
    except torch.OutOfMemoryError:
        inputs, following = batch
        half = len(inputs) // 2
        return train_plain(run, (inputs[:half], following[:half]))


def train_fitted(run: Training, batch: Batch) -> float:
    """The whole batch, in as few micro-batches as fit."""
    result = step(run.loss, batch)
    return result.loss.item()


def run_paged(
    model: CharTransformer, batch: Batch, budget_bytes: int, folder: Path
) -> tuple[list[Tensor], PagingPlan, PagingReport]:
    """Run a model within a budget: the third pass is the first that was prepared for."""
    with page(model, "cpu", budget=budget_bytes, host=folder) as handle:
        losses = [model.loss(*batch) for _ in range(3)]
        return losses, handle.plan, handle.report()


def train_paged(run: Training, batch: Batch, device: torch.device, budget: int) -> StepResult:
    """The gradients of a batch too large for a device that the model is too large for."""
    model = run.model
    with page(model, device, budget=budget, training=True, activations="host"):
        return step(run.loss, batch, model=model)
