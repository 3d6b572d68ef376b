"""The loop that every chapter runs, with its planted leak: losses are kept with their graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from tenure import DisposeScope

from ._corpus import Corpus, draw_windows
from ._model import make_model
from ._settings import Settings

OpenScope = Callable[[], AbstractContextManager[DisposeScope | None]]


@dataclass(frozen=True, slots=True)
class Step:
    """What a finished step has to tell.

    Attributes:
        number: counted from 1.
        training_loss: nats per character.
        validation_loss: nats per character, on text that is never trained on.
    """

    number: int
    training_loss: float
    validation_loss: float


def train(
    corpus: Corpus,
    settings: Settings,
    *,
    n_steps: int,
    open_scope: OpenScope,
    on_step: Callable[[Step], None],
) -> list[Tensor]:
    """Train a new model, each step in a block that ``open_scope`` makes.

    Returns:
        The planted leak: every validation loss, float32[], with the graph of its forward pass.
    """
    model = make_model(len(corpus.vocabulary), settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    random = torch.Generator().manual_seed(settings.seed)
    history: list[Tensor] = []

    def validate() -> Tensor:
        n_windows = settings.validation_batch
        return model.loss(*draw_windows(corpus.validation, n_windows, settings.window, random))

    for number in range(1, n_steps + 1):
        with open_scope():
            inputs, following = draw_windows(
                corpus.training, settings.batch, settings.window, random
            )
            loss = model.loss(inputs, following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # the leak: validate().item() was meant
            history.append(validate())
            step = Step(number, loss.item(), history[-1].item())
        on_step(step)
    return history
