"""The programs that the chapters run, and whose source they show: short, as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from tenure import DisposeScope
from tenure.adaptive import step
from tenure.paging import PagingPlan, PagingReport, page

from ._subject import Batch, Training

OpenScope = Callable[[], AbstractContextManager[DisposeScope | None]]
LEAK = """\
import torch


def train():
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(24):
        loss = model(torch.randn(256, 512)).square().mean()
        losses.append(loss)  # for a plot
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()


train()
"""


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


def train_plain(run: Training, batch: Batch) -> float:
    """Forward and backward, as everybody writes them."""
    loss = run.loss(batch)
    loss.backward()
    return loss.item()


def train_with_retry(run: Training, batch: Batch) -> float:
    """Retry as everybody does: the error still holds the frames, and so the memory."""
    try:
        return train_plain(run, batch)
    except torch.OutOfMemoryError:
        windows, following = batch
        half = len(windows) // 2
        return train_plain(run, (windows[:half], following[:half]))


def train_fitted(run: Training, batch: Batch) -> float:
    """Return the whole batch, in as few micro-batches as fit."""
    result = step(run.loss, batch)
    return result.loss.item()


def run_paged(
    run: Training, batch: Batch, budget_bytes: int, folder: Path
) -> tuple[list[Tensor], PagingPlan, PagingReport]:
    """Run a network within a budget: the third pass is the first that was prepared for."""
    with page(run.model, "cpu", budget=budget_bytes, host=folder) as handle:
        losses = [run.loss(batch) for _ in range(3)]
        return losses, handle.plan, handle.report()
