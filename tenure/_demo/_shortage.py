"""Chapters four and five, too little memory: for the batch of a step, for a whole model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tenure._text import format_bytes
from tenure.adaptive import AdaptiveEvent, add_listener, memory_budget, remove_listener, step
from tenure.paging import page

from ._corpus import Corpus, draw_windows
from ._model import CharTransformer, make_model
from ._screen import Screen, silent
from ._settings import MORE_THAN_THERE_IS, Settings

_SHARE_OF_PEAK = 0.6
"""How much of the peak of the plain run the fourth chapter's budget allows."""
_SHARE_OF_WEIGHTS = 0.5
"""How much of the weights the fifth chapter's budget allows at once."""
_PASSES = 3
"""The first pass learns the order, the second is prepared by it, the third is reported."""

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class _Training:
    """A model, its optimizer and its batches, the same ones for every run."""

    corpus: Corpus
    settings: Settings
    model: CharTransformer = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = make_model(len(self.corpus.vocabulary), self.settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.learning_rate)

    def batches(self) -> Iterator[Batch]:
        random = torch.Generator().manual_seed(self.settings.seed)
        for _ in range(self.settings.compared_steps):
            yield draw_windows(
                self.corpus.training, self.settings.batch, self.settings.window, random
            )

    def loss(self, batch: Batch) -> Tensor:
        return self.model.loss(*batch)

    def run(self, gradients: Callable[[Batch], float]) -> None:
        """Take a step for each batch, with what ``gradients`` leaves in the parameters."""
        for batch in self.batches():
            self.optimizer.zero_grad()
            loss = gradients(batch)
            self.optimizer.step()
            self.losses.append(loss)

    def plain(self, batch: Batch) -> float:
        loss = self.loss(batch)
        loss.backward()
        return loss.item()

    def retried_in_except(self, batch: Batch) -> float:
        try:
            return self.plain(batch)
        except torch.OutOfMemoryError:
            # the exception still holds the frames of the attempt: this is the mistake that is shown
            half = len(batch[0]) // 2
            return self.plain((batch[0][:half], batch[1][:half]))

    def fitted(self, batch: Batch) -> float:
        return step(self.loss, batch, model=self.model).loss.item()


def train_within_a_budget(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """See plain steps fail under a budget, and finish there with the losses of the plain run."""
    n_steps = settings.compared_steps
    screen.chapter(f"4. {n_steps} steps in too little memory for their batch of {settings.batch}")
    whole = _Training(corpus, settings)
    with memory_budget(MORE_THAN_THERE_IS) as measured:
        whole.run(whole.plain)
    limit_bytes = int(_SHARE_OF_PEAK * measured.peak_bytes)
    screen.say(
        f"Plain PyTorch needs {format_bytes(measured.peak_bytes)}. From here on there are "
        f"{format_bytes(limit_bytes)}."
    )
    screen.say(f"Plain PyTorch: {_failure(corpus, settings, limit_bytes, _Training.plain)}")
    screen.say(
        "Half the batch, tried again inside `except`: "
        f"{_failure(corpus, settings, limit_bytes, _Training.retried_in_except)}"
    )
    fitted = _Training(corpus, settings)
    with _told(screen), memory_budget(limit_bytes) as budget:
        fitted.run(fitted.fitted)
    screen.say(f"tenure.adaptive.step finishes within {format_bytes(budget.peak_bytes)}:")
    _compare(screen, whole.losses, fitted.losses)


def _failure(
    corpus: Corpus,
    settings: Settings,
    limit_bytes: int,
    gradients: Callable[[_Training, Batch], float],
) -> str:
    training = _Training(corpus, settings)
    try:
        with memory_budget(limit_bytes):
            training.run(lambda batch: gradients(training, batch))
    except torch.OutOfMemoryError as error:
        return f"step {len(training.losses) + 1} fails. {str(error).partition(' in ')[0]}."
    return "finishes."


def _compare(screen: Screen, whole: list[float], fitted: list[float]) -> None:
    screen.heading(["step", "unsplit loss", "split loss"])
    for number, losses in enumerate(zip(whole, fitted, strict=True), 1):
        screen.row([str(number), *(f"{loss:.4f}" for loss in losses)])
    apart = max(abs(one - other) for one, other in zip(whole, fitted, strict=True))
    screen.say(f"The two loss curves differ by {apart:.0e} at the most: rounding.")


@contextmanager
def _told(screen: Screen) -> Iterator[None]:
    """Print what a retry decides."""

    def say(event: AdaptiveEvent) -> None:
        screen.say(f"  {event}")

    add_listener(say)
    try:
        # it logs the same
        with silent("tenure.adaptive"):
            yield
    finally:
        remove_listener(say)


@torch.inference_mode()
def run_paged(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a model from a folder within half of its size, and print what the pager tells of it."""
    model = make_model(len(corpus.vocabulary), settings).eval()
    random = torch.Generator().manual_seed(settings.seed)
    windows, following = draw_windows(
        corpus.validation, settings.validation_batch, settings.window, random
    )
    weight_bytes = sum(p.nbytes for p in model.parameters())
    budget_bytes = int(_SHARE_OF_WEIGHTS * weight_bytes)
    screen.chapter(
        f"5. {format_bytes(weight_bytes)} of weights in {format_bytes(budget_bytes)} of memory"
    )
    whole = model.loss(windows, following)
    with (
        tempfile.TemporaryDirectory() as folder,
        page(model, "cpu", budget=budget_bytes, host=Path(folder)) as handle,
    ):
        screen.say(str(handle.plan).partition("\n    ")[0])
        screen.say(
            "The plan times the copies alone, at an assumed speed; the next lines are measured."
        )
        paged = [model.loss(windows, following) for _ in range(_PASSES)]
        screen.say(str(handle.report()))
    same = "the same" if all(map(whole.equal, paged)) else "NOT the same"
    screen.say(f"The loss of the paged model is {same} to the last bit.")
